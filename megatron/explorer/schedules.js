// Pipeline schedules: the actions of each stage in order, the moments of a stage, and the time of all of them. They are
// those of megatron/schedules, with which a test compares every action.
//
// An action is [kind, microbatch, chunk], with the kinds forward, backward and weight gradient.

const F = 0,
  B = 1,
  W = 2;

function microbatchGroups({stages, microbatches, groupSize}) {
  const full = Math.floor(microbatches / groupSize),
    rest = microbatches % groupSize;
  let sizes = Array(full).fill(groupSize);
  if (rest <= full && rest < stages) sizes = sizes.map((size, number) => size + (number < rest ? 1 : 0));
  else if (full === 0) sizes = [rest];
  else sizes.push(Math.max(rest, stages));
  let start = 0;
  return sizes.map((size) => Array.from({length: size}, () => start++));
}

// `ahead` forward passes, then one forward and one backward pass in turn.
function alternate(forwards, backwards, ahead) {
  ahead = Math.min(ahead, forwards.length);
  const actions = forwards.slice(0, ahead).map(([chunk, microbatch]) => [F, microbatch, chunk]);
  backwards.forEach(([chunk, microbatch], number) => {
    if (ahead + number < forwards.length) {
      const [nextChunk, next] = forwards[ahead + number];
      actions.push([F, next, nextChunk]);
    }
    actions.push([B, microbatch, chunk]);
  });
  return actions;
}

// Numbers the microbatches of each kind and chunk, and omits numbers beyond the batch.
function passCounter(microbatches) {
  const next = {},
    actions = [];
  const run = (...passes) => {
    for (const pass of passes) {
      const [kind, chunk] = pass,
        microbatch = next[pass] ?? 0;
      next[pass] = microbatch + 1;
      if (microbatch < microbatches) actions.push([kind, microbatch, chunk]);
    }
  };
  const times = (count, ...passes) => {
    for (let number = 0; number < count; number++) run(...passes);
  };
  return {run, times, actions};
}

const F0 = [F, 0],
  F1 = [F, 1],
  B0 = [B, 0],
  B1 = [B, 1],
  W0 = [W, 0],
  W1 = [W, 1];

function oneForwardOneBackward(stage, {stages, microbatches}) {
  const order = Array.from({length: microbatches}, (_, microbatch) => [0, microbatch]);
  return alternate(order, order, stages - stage - 1);
}

const SCHEDULES = {
  "1f1b": {chunks: "one", actions: oneForwardOneBackward},
  interleaved: {
    chunks: "several",
    actions: (stage, shape) => {
      const groups = microbatchGroups(shape),
        chunks = [...Array(shape.chunks).keys()];
      const order = (chunks) => groups.flatMap((group) => chunks.flatMap((chunk) => group.map((one) => [chunk, one])));
      const longest = Math.max(...groups.map((group) => group.length));
      const ahead = 2 * (shape.stages - stage - 1) + (shape.chunks - 1) * longest;
      const actions = alternate(order(chunks), order(chunks.toReversed()), ahead);
      return actions.filter(([, microbatch]) => microbatch < shape.microbatches);
    },
  },
  "zb-h1": {
    chunks: "one",
    splits: true,
    actions: (stage, shape) => {
      const actions = [];
      for (const action of oneForwardOneBackward(stage, shape)) {
        actions.push(action);
        if (action[0] === B && action[1] >= stage) actions.push([W, action[1] - stage, 0]);
      }
      for (let one = Math.max(0, shape.microbatches - stage); one < shape.microbatches; one++)
        actions.push([W, one, 0]);
      return actions;
    },
  },
  "zb-v": {
    chunks: "two",
    isV: true,
    splits: true,
    actions: (stage, {stages, microbatches}) => {
      const after = stages - stage,
        {times, actions} = passCounter(microbatches);
      times(2 * after - 1, F0);
      times(stage, F1, F0);
      times(after, F1, B1, W1);
      times(microbatches - stages, F0, B0, W0, F1, B1, W1);
      times(stage, B0, B1);
      times(after, B0, W0);
      times(stage, W1);
      times(stage, W0);
      return actions;
    },
  },
  "dualpipe-v": {
    chunks: "two",
    isV: true,
    splits: true,
    actions: (stage, {stages, microbatches}) => {
      const after = stages - stage - 1,
        {run, times, actions} = passCounter(microbatches),
        late = [];
      times(2 * after, F0);
      times(stage + 1, F0, F1);
      times(after, B1, W1, F1);
      times(Math.max(microbatches, 2 * stages) - 2 * stages + stage + 1, F0, B1, W1, F1, B0, W0);
      times(after, B1, W1, F1, B0, W0);
      for (let number = 0; number < 2 * (stage + 1); number++) {
        const [backward, weight] = number % 2 === 0 ? [B1, W1] : [B0, W0];
        run(backward);
        if (number <= stage) run(weight);
        else late.push(weight);
      }
      for (let number = 0; number < after; number++) {
        run(late.shift(), B0);
        late.push(W0);
      }
      run(...late);
      return actions;
    },
  },
  gpipe: {
    chunks: "one",
    actions: (stage, {microbatches}) =>
      [F, B].flatMap((kind) => Array.from({length: microbatches}, (_, microbatch) => [kind, microbatch, 0])),
  },
};

const allowsChunks = (schedule, chunks) =>
  ({one: chunks === 1, several: chunks > 1, two: chunks === 2})[SCHEDULES[schedule].chunks];

// The virtual stage of a chunk of a stage, and the stage of a virtual stage.
const virtualStage = (stage, chunk, stages, isV) =>
  isV && chunk === 1 ? 2 * stages - 1 - stage : chunk * stages + stage;
const stageOf = (number, stages, isV) =>
  isV && Math.floor(number / stages) % 2 === 1 ? stages - 1 - (number % stages) : number % stages;

// The actions of all stages in an order in which they can run, with the places of the actions that they wait for:
// [stage, virtual stage, kind, [places], microbatch, chunk].
function program(name, stages, chunks, microbatches, groupSize = stages) {
  const {actions, isV} = SCHEDULES[name],
    shape = {stages, microbatches, chunks, groupSize};
  const last = stages * chunks - 1,
    place = new Map(),
    found = [];
  const lists = [...Array(stages).keys()].map((stage) => actions(stage, shape));
  const key = (kind, microbatch, number) => (kind * microbatches + microbatch) * (last + 1) + number;
  const reached = Array(stages).fill(0);
  for (let isMoving = true; isMoving;) {
    isMoving = false;
    lists.forEach((list, stage) => {
      for (; reached[stage] < list.length; reached[stage]++) {
        const [kind, microbatch, chunk] = list[reached[stage]],
          number = virtualStage(stage, chunk, stages, isV);
        const needs = [];
        if (kind === F && number > 0) needs.push(key(F, microbatch, number - 1));
        if (kind === B) needs.push(key(F, microbatch, number));
        if (kind === B && number < last) needs.push(key(B, microbatch, number + 1));
        if (kind === W) needs.push(key(B, microbatch, number));
        if (!needs.every((one) => place.has(one))) break;
        place.set(key(kind, microbatch, number), found.length);
        found.push([stage, number, kind, needs.map((one) => place.get(one)), microbatch, chunk]);
        isMoving = true;
      }
    });
  }
  if (reached.some((count, stage) => count < lists[stage].length)) throw new Error(`${name} deadlocks`);
  return found;
}

// The start and the end of each action of a program; `duration(kind, virtual stage)` in any unit, a message takes none.
function runProgram(actions, stages, duration) {
  const free = new Float64Array(stages),
    ends = new Float64Array(actions.length),
    starts = new Float64Array(actions.length);
  actions.forEach(([stage, number, kind, needs], place) => {
    let start = free[stage];
    for (const need of needs) start = Math.max(start, ends[need]);
    starts[place] = start;
    free[stage] = ends[place] = start + duration(kind, number);
  });
  return {starts, ends, makespan: Math.max(...free)};
}

// The different passes of a stage, each with what the stage holds beside it: rows of a pass (its kind times the chunks,
// plus the chunk), by chunk the other microbatches between forward and backward pass, by chunk those between backward
// pass and weight gradients, and whether the input of the next pass is being received.
function momentsOf(name, stages, microbatches, chunks, stage, groupSize = stages) {
  const {actions, isV, splits} = SCHEDULES[name],
    last = stages * chunks - 1;
  let count = microbatches;
  if (name !== "gpipe") {
    // With so many microbatches a schedule reaches its steady state; as many are beyond whole groups.
    const groups = Math.floor(microbatches / groupSize),
      rest = microbatches % groupSize;
    count = Math.min(groups, Math.max(4, Math.floor((2 * stages) / groupSize) + 2, rest + 1)) * groupSize + rest;
  }
  const receives = [];
  for (let chunk = 0; chunk < chunks; chunk++) {
    const here = virtualStage(stage, chunk, stages, isV);
    [here - 1, here + 1].forEach((source, kind) => {
      receives[kind * chunks + chunk] = source >= 0 && source <= last && stageOf(source, stages, isV) !== stage ? 1 : 0;
    });
  }
  const list = actions(stage, {stages, microbatches: count, chunks, groupSize});
  const live = Array(chunks).fill(0),
    deferred = Array(chunks).fill(0),
    rows = new Map();
  list.forEach(([kind, , chunk], place) => {
    // A backward pass has already taken its microbatch, a forward pass does not hold its own yet.
    if (kind === B) live[chunk] -= 1;
    if (kind === W && splits) deferred[chunk] -= 1;
    const next = list[place + 1];
    const row = [kind * chunks + chunk, ...live, ...deferred, next ? (receives[next[0] * chunks + next[2]] ?? 0) : 0];
    rows.set(row.join(), row);
    if (kind === F) live[chunk] += 1;
    if (kind === B && splits) deferred[chunk] += 1;
  });
  return [...rows.values()];
}
