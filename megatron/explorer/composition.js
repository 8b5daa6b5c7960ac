// The memory and the time of a layout from the records of its units, as the search composes them: state bytes, records
// times the moments of the schedule, prices of launches, the pipeline. A test compares both. Sizes are bytes, times seconds.

const TERMS = [
  "products",
  "attention",
  "between products",
  "recompute",
  "tensor parallelism",
  "context parallelism",
  "expert parallelism",
  "gaps",
  "output layer",
  "pipeline messages",
  "bubble",
  "data parallelism",
  "optimizer",
];
const TERM = Object.fromEntries(TERMS.map((name, place) => [name, place]));
const TERM_OF_AXIS = {
  tp: "tensor parallelism",
  cp: "context parallelism",
  ep: "expert parallelism",
  etp: "expert parallelism",
};
const ALLOWANCE = 4 * 2 ** 30;
const ALIGNMENT = 64;
const sum = (values) => values.reduce((total, one) => total + one, 0);
const range = (count) => [...Array(count).keys()];

// --- where ranks are -------------------------------------------------------------------------------------------------

// The ranks of the group of rank 0 along axes, as RankGrid.group (megatron/core/topology.py) has them.
function groupOfFirst(grid, axes) {
  const chosen = new Set(axes.flatMap((axis) => (axis === "dp" ? ["dp_shard", "dp_replicate"] : [axis])));
  const shards = grid.dp / grid.dp_replicas,
    order = grid.order.split("-");
  const faster = order.slice(0, order.indexOf("pp")).filter((axis) => axis !== "ep");
  const stride = faster.reduce((size, axis) => size * grid[axis], 1);
  const stages = chosen.delete("pp") ? range(grid.pp) : [0];
  let dimensions = order.flatMap((axis) =>
    axis === "dp"
      ? [
          ["dp_shard", shards],
          ["dp_replicate", grid.dp_replicas],
        ]
      : axis === "pp" || axis === "ep"
        ? []
        : [[axis, grid[axis]]],
  );
  if (["etp", "ep", "edp", "edp_shard", "edp_replicate"].some((axis) => chosen.has(axis))) {
    const isInParts = chosen.has("edp_shard") || chosen.has("edp_replicate"),
      edp = edpOf(grid);
    dimensions = [
      ["etp", grid.etp],
      ["ep", grid.ep],
    ];
    if (isInParts) dimensions.push(["edp_shard", edp / grid.dp_replicas], ["edp_replicate", grid.dp_replicas]);
    else dimensions.push(["edp", edp]);
  }
  let places = [0],
    step = 1;
  for (const [axis, size] of dimensions) {
    if (chosen.has(axis)) places = places.flatMap((place) => range(size).map((number) => place + number * step));
    step *= size;
  }
  const rankAt = (stage, place) => (Math.floor(place / stride) * grid.pp + stage) * stride + (place % stride);
  return stages.flatMap((stage) => places.map((place) => rankAt(stage, place))).sort((a, b) => a - b);
}

const edpOf = (grid) => (grid.tp * grid.cp * grid.dp) / (grid.etp * grid.ep);
// Ranks in the node or pod of `number` ranks that has the first of them.
const together = (ranks, number) =>
  ranks.filter((rank) => Math.floor(rank / number) === Math.floor(ranks[0] / number)).length;

// --- prices of single operations, as megatron/planner/step_time/prices.py has them -----------------------------------

function attentionFlops(cluster, length) {
  const c = cluster.constants,
    kernel = cluster.generation === "ampere" ? "flash" : "cudnn";
  return ((c[`${kernel}_${cluster.generation}`] * length) / (length + c.attention_length)) * cluster.bf16_flops;
}

function productSeconds(cluster, rows, columns, depth, traffic, isFp8, count) {
  const c = cluster.constants,
    efficiency = c[`product_${cluster.generation}`];
  const rate = cluster.bf16_flops * efficiency * (isFp8 ? 2 * c.product_fp8 : 1);
  const waves = (count * Math.ceil(rows / 128) * Math.ceil(columns / 256)) / cluster.multiprocessors;
  const quantization = 1 + c.wave_quantization * (Math.ceil(waves) / waves - 1);
  const computation = ((2 * rows * columns * depth) / rate) * (1 + c.product_depth / depth);
  return count * (computation * Math.min(quantization, 4) + (c.product_bytes * traffic) / cluster.hbm_bytes_per_s);
}

const elementwiseSeconds = (cluster, bytes) => (cluster.constants.own_elementwise * bytes) / cluster.hbm_bytes_per_s;
const podShare = (cluster, inPod, leaves) => (leaves ? Math.min(1, inPod / cluster.oversubscription) : 1);

function ringRate(cluster, inNode, isInNode, share) {
  const c = cluster.constants,
    link = c.link * cluster.link_bytes_per_s;
  return isInNode ? link : Math.min(link, c.network * cluster.network_bytes_per_s * inNode * share);
}

function exchangeSeconds(cluster, sent, size, inNode) {
  const c = cluster.constants,
    others = Math.max(size - 1, 1);
  return Math.max(
    (sent * (inNode - 1)) / others / (c.link * cluster.link_bytes_per_s),
    (sent * (size - inNode)) / others / (c.network * cluster.network_bytes_per_s),
  );
}

const RINGS = {all_reduce: 2, all_gather: 1, reduce_scatter: 1, broadcast: 1};
const EXPOSED_RING = 0.2;
const BF16_GRADIENT_SAVES = 2 * (4 - 2); // bytes of an element that is read and written

function axisOf(axes) {
  if (["tp", "cp", "etp", "ep"].includes(axes)) return axes;
  return [...axes.split("x")].sort().join() === "ep,etp" ? "ep" : "other";
}

// [pass][term] seconds of a unit's launches, and what its collectives send.
function priceUnit(layout, record, isRecomputed) {
  const {cluster, grid} = layout,
    c = cluster.constants;
  const exposed = {whole: 1, messages: c.exposed_tensor_parallel, ring: EXPOSED_RING, hidden: 0};
  const seconds = [0, 1, 2].map(() => new Float64Array(TERMS.length));
  const sent = {};
  record[2].forEach((number, pass) => {
    layout.data.shared.passes[number].forEach(([bytes, attention, products, collectives], isAgain) => {
      const add = (term, value) => (seconds[pass][isAgain ? TERM.recompute : TERM[term]] += value);
      add("between products", elementwiseSeconds(cluster, bytes));
      for (const [times, flops, length] of attention) {
        add("attention", (times * flops) / attentionFlops(cluster, length || layout.seq_length));
      }
      for (const [times, rows, columns, depth, traffic, dtype, count, isAccumulated] of products) {
        const saved = isAccumulated && layout.derives ? BF16_GRADIENT_SAVES * rows * columns * count : 0;
        const sizes = isAccumulated ? [columns, rows] : [rows, columns];
        add(
          "products",
          times *
            (dtype === 2
              ? (2 * rows * columns * depth * count) / (cluster.bf16_flops / 16)
              : productSeconds(cluster, ...sizes, depth, (traffic - saved) / count, dtype === 1, count)),
        );
      }
      for (const [times, kind, axes, bytes, exposure, ranksOfContext] of collectives) {
        const ranks = axes === "cp" ? ranksOfContext : groupOfFirst(grid, axes.split("x"));
        const axis = axisOf(axes),
          size = ranks.length,
          inNode = together(ranks, cluster.node_size);
        const inPod = together(ranks, cluster.pod_size ?? layout.num_gpus);
        const share = podShare(cluster, inPod, inPod < size);
        let moved = bytes,
          time;
        if (kind in RINGS) {
          moved = ((RINGS[kind] * (size - 1)) / size) * bytes;
          time = moved / ringRate(cluster, inNode, inNode === size, share);
        } else if (kind === "all_to_all" || (kind === "exchange" && (axis === "ep" || axis === "etp"))) {
          moved = bytes * (kind === "all_to_all" ? (size - 1) / size : 1);
          time = exchangeSeconds(cluster, moved, size, inNode);
        } else time = bytes / ringRate(cluster, 1, inNode === size, share);
        add(TERM_OF_AXIS[axis], times * time * exposed[exposure]);
        const place = inNode === size ? "inside" : "across";
        sent[axis] ??= {inside: 0, across: 0};
        sent[axis][place] += times * moved;
      }
    });
  });
  const gap = (c.layer_gap * record[3]) / 3;
  seconds[0][TERM.gaps] += gap;
  seconds[1][TERM.gaps] += (isRecomputed ? 3 : 2) * gap;
  return {seconds, sent};
}

// --- the layout ------------------------------------------------------------------------------------------------------

// The virtual stages: the kinds of their layers (whether recomputed, of experts, with RoPE), and their ends.
function divide(layout) {
  const {job, pp, vp, counted, recompute, recomputeLayers} = layout,
    count = pp * vp;
  const counts = Array(count).fill((job.num_layers + sum(counted)) / count);
  counts[0] -= counted[0];
  counts[count - 1] -= counted[1];
  let first = 0;
  const stages = counts.map((size, number) => {
    const kinds = range(size).map(
      (place) => (recompute === "full" && place < recomputeLayers ? "1" : "0") + job.layer_kinds[first + place],
    );
    first += size;
    const ends = (number === 0 ? "E" : "") + (number === count - 1 ? "L" : "");
    return {kinds, hasEmbedding: number === 0, hasOutput: number === count - 1, kind: `${ends} ${kinds.join(" ")}`};
  });
  const kinds = stages.map((stage) => stage.kind);
  const like = kinds.map((kind) => kinds.indexOf(kind));
  const {isV} = SCHEDULES[layout.schedule];
  const byStage = range(pp).map((stage) => range(vp).map((chunk) => virtualStage(stage, chunk, pp, isV)));
  return {stages, like, byStage, contents: byStage.map((numbers) => numbers.map((number) => like[number]))};
}

// A layout with everything that memory and time need. Options have the names of flags.
function layoutOf(data, options) {
  const o = {...DEFAULTS, ...options},
    tp = o.tensor_model_parallel_size,
    pp = o.pipeline_model_parallel_size;
  const cp = o.context_parallel_size,
    ep = o.expert_model_parallel_size,
    strategy = o.data_parallel_sharding_strategy;
  const job = jobOf(data, o),
    cluster = data.clusters[o.cluster];
  const dp = o.num_gpus / (tp * pp * cp);
  const isSharded = strategy !== "no_shard";
  const replicas = isSharded ? o.num_distributed_optimizer_instances : dp;
  const grid = {
    tp,
    cp,
    pp,
    dp,
    ep,
    etp: job.num_experts ? o.expert_tensor_parallel_size : tp,
    dp_replicas: replicas,
    order: ep > 1 ? "tp-cp-ep-dp-pp" : "tp-cp-ep-pp-dp",
  };
  const schedule = pp > 1 ? o.pipeline_schedule : "1f1b";
  const edp = edpOf(grid),
    shards = [(cp * dp) / replicas, Math.max(1, Math.floor((job.num_experts ? edp : 1) / replicas))];
  const isFullySharded = strategy === "optim_grads_params" && Math.max(...shards) > 1;
  const recompute = {full: "full", selective: o.recompute_modules.toSorted().join(",")}[o.recompute_granularity] ?? "";
  const overlaps = dp * cp > 1;
  const layout = {
    data,
    job,
    cluster,
    grid,
    tp,
    pp,
    cp,
    dp,
    ep,
    etp: grid.etp,
    edp,
    schedule,
    strategy,
    isSharded,
    isFullySharded,
    recompute,
    replicas,
    shards: isSharded ? shards : [1, 1],
    num_gpus: o.num_gpus,
    seq_length: job.seq_length,
    mbs: o.micro_batch_size,
    vp: pp > 1 ? chunksOf(o) : 1,
    microbatches: o.global_batch_size / (o.micro_batch_size * dp),
    globalBatch: o.global_batch_size,
    // Whether the embedding and the output layer count as a layer each in the division among the stages.
    counted:
      pp > 1 ? [o.account_for_embedding_in_pipeline_split, o.account_for_loss_in_pipeline_split].map(Number) : [0, 0],
    recomputeLayers: o.recompute_num_layers,
    sp: o.sequence_parallel && tp > 1,
    tpOverlap: o.tp_comm_overlap && tp > 1,
    overlapsReduction: o.overlap_grad_reduce && overlaps,
    overlapsGathers: o.overlap_param_gather && overlaps && isSharded,
    weightBytes: 2,
    gradientBytes: o.grad_reduce_in_bf16 ? 2 : 4,
    momentBytes: 8,
    masterBytes: 4,
    derives: o.grad_reduce_in_bf16 && job.precision === "bf16",
    splits: Boolean(SCHEDULES[schedule].splits),
  };
  const modules = recompute && recompute !== "full" ? [recompute] : [];
  const dropsWeights = isFullySharded && job.precision === "fp8";
  const shared = [tp, layout.sp, layout.tpOverlap, cp, o.micro_batch_size];
  const numbers = (values) => values.map(Number).join();
  const sizes = numbers([...shared, ep, layout.etp, layout.splits, dropsWeights]);
  layout.records = job.layers[[cp > 1 ? o.cp_comm_type : "", sizes, ...modules].join()];
  layout.ends = job.ends[numbers([...shared, o.grad_reduce_in_bf16])];
  if (!layout.records || !layout.ends) throw new Error(describe(layout, o));
  layout.division = divide(layout);
  return layout;
}

// What the records of a layout's layers depend on, in words.
const describe = (layout, o) =>
  [
    `TP ${layout.tp}`,
    layout.sp ? "with sequence parallelism" : "",
    layout.tpOverlap ? "with overlap" : "",
    `CP ${layout.cp}${layout.cp > 1 ? ` by ${o.cp_comm_type}` : ""}`,
    layout.job.num_experts ? `EP ${layout.ep}, ETP ${layout.etp}` : "",
    `microbatches of ${layout.mbs}`,
    layout.recompute ? `recompute of ${layout.recompute}` : "",
    o.grad_reduce_in_bf16 ? "gradients in bf16" : "",
    layout.job.precision === "fp8" ? "FP8" : "",
  ]
    .filter(Boolean)
    .join(", ");

// The job of the options; with another number of layers they repeat the model's.
function jobOf(data, o) {
  const job = data.jobs[jobName(o)],
    layers = o.num_layers;
  if (!job || !layers || layers === job.num_layers) return job;
  const kinds = range(layers).map((layer) => job.layer_kinds[layer % job.num_layers]);
  const flops = job.flops_of_output + sum(kinds.map((kind) => job.flops_of_layer[kind]));
  return {...job, num_layers: layers, layer_kinds: kinds, flops_per_token: flops};
}

const jobName = ({model, seq_length, precision}) => `${model},${seq_length},${precision}`;

// The units of a virtual stage: the record, the kind, and whether it is recomputed.
function unitsOf(layout, number) {
  const stage = layout.division.stages[number],
    [embedding, output] = layout.ends;
  const units = stage.kinds.map((kind) => ({record: layout.records[kind], isRecomputed: kind[0] === "1", kind}));
  if (stage.hasEmbedding) units.unshift({record: embedding, kind: "embedding"});
  if (stage.hasOutput) units.push({record: output, kind: "output"});
  return units;
}

// --- time ------------------------------------------------------------------------------------------------------------

// [pass][term] of a microbatch in a virtual stage, and the bytes that it sends by axis.
function passesOf(layout, number) {
  layout.passes ??= new Map();
  layout.unitPrices ??= new Map();
  const found = layout.passes.get(number);
  if (found) return found;
  const seconds = [0, 1, 2].map(() => new Float64Array(TERMS.length)),
    sent = {};
  for (const {record, isRecomputed, kind} of unitsOf(layout, number)) {
    if (!layout.unitPrices.has(kind)) {
      const derives = layout.derives && kind !== "embedding" && kind !== "output";
      layout.unitPrices.set(kind, priceUnit({...layout, derives}, record, isRecomputed));
    }
    const price = layout.unitPrices.get(kind);
    price.seconds.forEach((terms, pass) =>
      terms.forEach((value, term) => {
        seconds[pass][kind === "output" ? TERM["output layer"] : term] += value;
      }),
    );
    for (const [axis, bytes] of Object.entries(price.sent)) {
      sent[axis] ??= {inside: 0, across: 0};
      sent[axis].inside += bytes.inside;
      sent[axis].across += bytes.across;
    }
  }
  layout.passes.set(number, {seconds, sent});
  return layout.passes.get(number);
}

const total = (passes) => sum(passes.map((terms) => sum([...terms])));
const sizesOf = (layout, record) => {
  const parameters = layout.data.shared.parameters[record[1]],
    of = (isExpert) =>
      sum(parameters.filter((one) => Boolean(one[2]) === isExpert).map(([rows, width]) => rows * width));
  return [of(false), of(true)];
};

// Parameters of a virtual stage outside of experts, of experts, and of its layers.
function parametersOf(layout, number) {
  const stage = layout.division.stages[number],
    [embedding, output, , , isTied] = layout.ends;
  let [dense, experts] = [0, 0];
  for (const kind of stage.kinds) {
    const [one, other] = sizesOf(layout, layout.records[kind]);
    dense += one;
    experts += other;
  }
  const inLayers = dense + experts;
  if (stage.hasEmbedding) dense += sizesOf(layout, embedding)[0];
  if (stage.hasOutput) dense += sizesOf(layout, output)[0];
  if (stage.hasEmbedding && stage.hasOutput && isTied) {
    const shared = layout.data.shared.parameters[output[1]].filter((one) => one[3]);
    dense -= sum(shared.map(([rows, width]) => rows * width));
  }
  return [dense, experts, inLayers];
}

function stepTime(layout) {
  const {cluster, division, pp, vp, microbatches: m, schedule, splits} = layout,
    c = cluster.constants;
  const {like} = division,
    isV = SCHEDULES[schedule].isV && pp > 1;
  const places = placesOf(layout),
    message = messageSeconds(layout, places);
  // The first, the slowest inner and the last virtual stage.
  const inner = [...new Set(like.slice(1, -1))];
  const slowestInner = inner.reduce(
    (best, one) =>
      best === undefined || total(passesOf(layout, one).seconds) > total(passesOf(layout, best).seconds) ? one : best,
    undefined,
  );
  const numbers = [0, slowestInner, like.length > 1 ? like.at(-1) : undefined];
  const termsOf = numbers.map((number) =>
    number === undefined
      ? [0, 1, 2].map(() => new Float64Array(TERMS.length))
      : passesOf(layout, number).seconds.map((terms) => terms.slice()),
  );
  for (const passes of termsOf) for (const pass of [0, 1]) passes[pass][TERM["pipeline messages"]] += message;
  writeGradients(layout, numbers, termsOf);
  const passes = termsOf.map((one) => one.map((terms) => sum([...terms]))); // [kind][pass]
  const whole = passes.map(sum);
  // How many of each the first, an inner and the last pipeline stage have.
  const isWhole = pp * vp === 1,
    hasLast = !(isV || isWhole);
  const shares = [
    [1, isV ? 0 : vp - 1, isV && !isWhole ? 1 : 0],
    [0, pp > 2 || isV ? vp : 0, 0],
    [0, hasLast ? vp - 1 : 0, hasLast ? 1 : 0],
  ];
  const stages = shares.map((share) => sum(share.map((count, kind) => count * whole[kind])));
  const slowest = Math.max(...stages),
    busiest = stages.indexOf(slowest);
  const terms = TERMS.map(
    (_, term) => m * sum(shares[busiest].map((count, kind) => count * sum(termsOf[kind].map((pass) => pass[term])))),
  );
  terms[TERM.gaps] += c.step;
  terms[TERM.bubble] = Math.max(makespan(layout, passes, slowest, busiest) - m * slowest, 0);
  const parameters = largestParameters(layout);
  const moves = (gathered, reduced, copied) => movedSeconds(layout, places, parameters, gathered, reduced, copied);
  terms[TERM["data parallelism"]] = dataParallelSeconds(layout, moves, slowest);
  terms[TERM.optimizer] = optimizerSeconds(layout, parameters);
  const larger = 1 + c.growth * Math.log2(Math.max(1, layout.num_gpus / 8));
  return {
    terms: Object.fromEntries(TERMS.map((name, place) => [name, terms[place] * larger])),
    seconds: sum(terms) * larger,
    passes,
    slowest,
    larger,
  };
}

function placesOf(layout) {
  const {cluster, grid, isSharded} = layout,
    pod = cluster.pod_size ?? layout.num_gpus;
  const groups = {
    stages: ["pp"],
    shards: isSharded ? ["cp", "dp_shard"] : ["cp", "dp"],
    replicas: ["dp_replicate"],
    expertShards: [isSharded ? "edp_shard" : "edp"],
  };
  return Object.fromEntries(
    Object.entries(groups).map(([name, axes]) => {
      const ranks = groupOfFirst(grid, axes);
      return [name, {inNode: together(ranks, cluster.node_size), inPod: together(ranks, pod)}];
    }),
  );
}

function messageSeconds({cluster, pp, vp, ends}, {stages}) {
  if (pp === 1) return 0;
  const c = cluster.constants,
    share = podShare(cluster, stages.inPod, stages.inPod < pp);
  const rate =
    stages.inNode === pp ? c.link * cluster.link_bytes_per_s : c.network * cluster.network_bytes_per_s * share;
  return (ends[3] / rate) * (vp > 1 ? c.exposed_interleaved_messages : c.exposed_messages);
}

// Gradients that are sharded are written, and not added to as in the records; every microbatch reduces them.
function writeGradients(layout, numbers, termsOf) {
  const {cluster, strategy, isFullySharded, gradientBytes, cp, dp, replicas, edp, splits} = layout;
  if (!(strategy === "optim_grads" || isFullySharded)) return;
  numbers.forEach((number, kind) => {
    if (number === undefined) return;
    const [dense, experts, ofLayers] = parametersOf(layout, number);
    const added = 3 * gradientBytes * (dense / ((dp * cp) / replicas) + experts / (edp / replicas));
    termsOf[kind][splits ? 2 : 1][TERM.products] -=
      (cluster.constants.product_bytes * gradientBytes * ofLayers) / cluster.hbm_bytes_per_s;
    termsOf[kind][1][TERM["between products"]] += elementwiseSeconds(cluster, added);
  });
}

function makespan(layout, passes, slowest, busiest) {
  const {pp, vp, microbatches: m, schedule} = layout,
    whole = passes.map(sum),
    count = pp * vp;
  if (pp > 1 && schedule !== "1f1b" && schedule !== "interleaved") return followed(layout, passes, slowest);
  const others = (count === 1 ? whole[0] : whole[0] + (count - 2) * whole[1] + whole[2]) - slowest;
  const before = whole[0] + Math.max(pp - (busiest === 2 ? 2 : 3), 0) * whole[1];
  return m * slowest + (vp > 1 && busiest > 0 ? before : others / vp);
}

const programs = new Map();

// The program of a schedule, of which the page follows the last that it needed.
function cachedProgram(name, stages, chunks, microbatches) {
  const key = [name, stages, chunks, microbatches].join();
  if (!programs.has(key)) {
    if (programs.size > 40) programs.clear();
    programs.set(key, program(name, stages, chunks, microbatches));
  }
  return programs.get(key);
}

function followed({pp, vp, microbatches, schedule, splits}, passes, slowest) {
  // Further microbatches repeat the middle of the pipeline at the pace of the slowest stage.
  const leftOut = Math.max(0, Math.ceil((microbatches - 3 * pp) / pp)) * pp,
    last = pp * vp - 1;
  const actions = cachedProgram(schedule, pp, vp, microbatches - leftOut);
  const hasW = splits && actions.some(([, , kind]) => kind === W);
  const durations = passes.map((times) => (hasW ? times : [times[0], times[1] + times[2]]));
  const run = runProgram(actions, pp, (kind, number) => durations[number === 0 ? 0 : number === last ? 2 : 1][kind]);
  return run.makespan + leftOut * slowest;
}

function largestParameters(layout) {
  const stages = layout.division.contents.map((content) => content.map((number) => parametersOf(layout, number)));
  return [0, 1].map((kind) => Math.max(...stages.map((stage) => sum(stage.map((sizes) => sizes[kind])))));
}

// Seconds to gather, reduce, and copy among replicas so many bytes of each parameter of the largest stage.
function movedSeconds(layout, places, [dense, experts], gathered, reduced, copied) {
  const {cluster, isSharded, replicas, dp, cp, edp} = layout;
  const rate = ({inNode, inPod}, ranks) =>
    ringRate(cluster, inNode, inNode >= ranks, podShare(cluster, inPod, inPod < ranks));
  const collectives = (ranks, place) => {
    const shards = isSharded ? ranks / replicas : 1,
      copies = ranks / shards;
    const ring = (shards - 1) / shards / rate(place, shards);
    return (
      (gathered + reduced) * ring +
      (((2 * (copies - 1)) / copies) * copied) / shards / rate(isSharded ? places.replicas : place, copies)
    );
  };
  return dense * collectives(dp * cp, places.shards) + experts * collectives(edp, places.expertShards);
}

function dataParallelSeconds(layout, moves, slowest) {
  const {cluster, microbatches: m, pp, vp, isSharded, isFullySharded, strategy} = layout,
    c = cluster.constants;
  const gradient = layout.gradientBytes,
    weight = layout.weightBytes;
  const exposedReduction = (once, window, overlaps) =>
    Math.max(once - (overlaps ? c.hidden_data_parallel * window : 0), 0.05 * once);
  const windowOf = (isInterleaved) => (isInterleaved ? Math.min(pp, m) : 1) * 0.6 * slowest;
  const isEach = isFullySharded || strategy === "optim_grads";
  const each = moves(isFullySharded ? 2 * weight : 0, isEach ? gradient : 0, 0);
  const gathered = moves(isSharded && !isFullySharded ? weight : 0, 0, 0);
  const reduced = moves(0, isEach ? 0 : gradient, gradient);
  const overlapped = (layout.overlapsGathers ? gathered : 0) + (layout.overlapsReduction ? reduced : 0);
  const once = exposedReduction(overlapped, windowOf(vp > 1), true) + (gathered + reduced - overlapped);
  if (isFullySharded) {
    const exposed = Math.max(each - c.hidden_data_parallel * slowest, 0) + c.fsdp2_contention * Math.min(each, slowest);
    return once + m * (layout.overlapsGathers ? exposed : each);
  }
  return once + m * exposedReduction(each, windowOf(false), layout.overlapsReduction);
}

function optimizerSeconds(layout, [dense, experts]) {
  const {cluster, isSharded, replicas, dp, cp, edp, gradientBytes: gradient, weightBytes: weight} = layout;
  const shard = (ranks) => (isSharded ? ranks / replicas : 1);
  const parameters = dense / shard(dp * cp) + experts / shard(edp);
  const moved =
    2 * (8 + layout.momentBytes) + (gradient < 4 ? 6 : 0) + (weight < 4 && !layout.isFullySharded ? 4 + weight : 0);
  return (cluster.constants.optimizer * (3 * gradient + moved) * parameters) / cluster.hbm_bytes_per_s;
}

// --- memory, as megatron/planner/search/stage_memory.py has it -------------------------------------------------------

const MEMORY = ["kept", "forward", "backward", "late_backward", "deferred", "experts_end", "end", "lasting"];
const memoryOf = (record) => Object.fromEntries(MEMORY.map((name, place) => [name, record[0][place]]));
const NO_BUFFERS = {start: 0, forward: 0, backward: 0, experts_end: 0, late_backward: 0, backward_end: 0};

function planBuffer(sizes, shards, bucketSize, alone) {
  const unit = shards * ALIGNMENT,
    parameters = [],
    buckets = [];
  let start = 0,
    position = 0;
  sizes.forEach((size, number) => {
    parameters.push([position, position + size]);
    position += size;
    const isFull = bucketSize !== null && position - start >= bucketSize;
    if (isFull || number === sizes.length - 1 || alone.has(number) || alone.has(number + 1)) {
      position = start + Math.ceil((position - start) / unit) * unit;
      buckets.push([start, position]);
      start = position;
    }
  });
  return {parameters, buckets, size: buckets.length ? buckets.at(-1)[1] : 0};
}

// Weights, gradients and optimizer state between the passes, and by unit what passes add.
function bufferedState(layout, units) {
  const state = {weights: 0, gradients: 0, optimizer: 0, units: units.map(() => ({...NO_BUFFERS})), everything: 0};
  const elements = sum(units.flat().map((weight) => weight.size));
  for (const isExpert of [false, true]) {
    const owners = units
      .flatMap((unit, number) => unit.map((weight) => [number, weight]))
      .reverse()
      .filter(([, weight]) => weight.isExpert === isExpert);
    if (!owners.length) continue;
    const shards = layout.shards[Number(isExpert)],
      sizes = owners.map(([, weight]) => weight.size);
    const alone = new Set(range(owners.length).filter((place) => owners[place][1].isTied));
    const copies = isExpert ? layout.edp : layout.cp * layout.dp;
    const hasBuckets = layout.overlapsReduction || layout.overlapsGathers || layout.strategy === "optim_grads";
    const plan = planBuffer(sizes, shards, hasBuckets ? Math.max(4e7, 1e6 * copies) : null, alone);
    const splits = layout.strategy === "optim_grads" && shards > 1;
    state.weights += plan.size * layout.weightBytes;
    state.gradients += (splits ? plan.size / shards : plan.size) * layout.gradientBytes;
    state.optimizer += ownElements(plan, shards) * (layout.momentBytes + layout.masterBytes);
    if (splits) {
      const used = wholeGradients(
        plan,
        owners.map(([number]) => number),
        units.length,
        shards,
        layout.overlapsReduction ? 2 : 0,
      );
      used.forEach((more, number) => {
        for (const name of Object.keys(NO_BUFFERS)) state.units[number][name] += layout.gradientBytes * more[name];
      });
      state.everything += plan.size * layout.gradientBytes;
    }
  }
  return state;
}

// Elements of the first rank, which has no padding unless it has all.
function ownElements({parameters, buckets}, shards) {
  const used = buckets.map(() => 0);
  let bucket = 0;
  for (const [first, stop] of parameters) {
    while (first >= buckets[bucket][1]) bucket += 1;
    used[bucket] = stop - buckets[bucket][0];
  }
  return sum(buckets.map(([start, stop], number) => Math.min((stop - start) / shards, used[number])));
}

// The most elements of whole gradients and of reductions under way, by unit.
function wholeGradients({parameters, buckets}, owners, numUnits, shards, inFlight) {
  const sizes = buckets.map(([start, stop]) => stop - start),
    count = Math.min(inFlight, sizes.length - 1);
  const parts = sizes.map((size) => size / shards);
  const pending = sizes.map((_, place) => sum(range(count).map((back) => parts.at(place - back - 1))));
  const idle = inFlight ? sum(parts.slice(-Math.min(inFlight, sizes.length))) : 0;
  const found = range(numUnits).map(() => ({...NO_BUFFERS, start: idle, forward: idle}));
  let place = 0;
  owners.forEach((owner, number) => {
    while (parameters[number][0] >= buckets[place][1]) place += 1;
    const most = Math.max(found[owner].backward, sizes[place] + pending[place]);
    found[owner] = {
      start: idle,
      forward: idle,
      backward: most,
      experts_end: 0,
      late_backward: most,
      backward_end: most,
    };
  });
  return found;
}

// Rows of every weight are sharded: a unit is gathered before it runs and reduced after it.
function fullyShardedState(layout, units, root) {
  const shard = (unit) => shardedUnit(layout, unit),
    common = shard(root);
  const dense = units.map((unit) => shard(unit.filter((one) => !one.isExpert)));
  const experts = units.map((unit) => shard(unit.filter((one) => one.isExpert)));
  const all = [...dense, ...experts, common],
    of = (name) => sum(all.map((one) => one[name]));
  const parts = dense
    .flatMap((one, place) => [
      [`${place} 0`, one.part],
      [`${place} 1`, experts[place].part],
    ])
    .filter(([, part]) => part);
  const inFlight = layout.overlapsReduction ? Math.min(2, parts.length - 1) : 0;
  const underWay = Object.fromEntries(
    parts.map(([name], place) => [
      name,
      sum(range(Math.max(0, inFlight)).map((back) => parts[(place + back + 1) % parts.length][1])),
    ]),
  );
  const idle = parts.length ? underWay[parts.at(-1)[0]] : 0,
    prefetches = layout.overlapsGathers;
  const keepsWeights = !layout.job.num_experts || layout.ep * layout.etp === 1;
  const buffers = dense.map((one, place) => {
    const inner = experts[place];
    const after = prefetches && place + 1 < units.length ? dense[place + 1].gathered : 0;
    const before = prefetches && place > 0 ? dense[place - 1].gathered : 0;
    const resident = one.gathered + before + common.wholeGradients;
    const late = resident + (underWay[`${place} 0`] ?? 0) + one.wholeGradients;
    const early = inner.wholeGradients ? resident + (underWay[`${place} 1`] ?? 0) + inner.wholeGradients : late;
    return {
      start: 2 * one.gathered + idle,
      forward: one.gathered + inner.gathered + after + idle,
      backward: early + inner.gathered,
      experts_end: inner.wholeGradients ? early + inner.wholeGradients + (keepsWeights ? inner.gathered : 0) : 0,
      late_backward: late,
      backward_end: late + one.wholeGradients,
    };
  });
  const everything = sum([...dense, ...experts].map((one) => one.wholeGradients));
  return {weights: common.gathered, gradients: of("gradients"), optimizer: of("state"), units: buffers, everything};
}

function shardedUnit(layout, unit) {
  const found = {state: 0, gradients: 0, gathered: 0, wholeGradients: 0, part: 0};
  for (const weight of unit) {
    const shards = layout.shards[Number(weight.isExpert)];
    const padded = Math.ceil(weight.rows / shards) * weight.width;
    found.state += Math.min(padded, weight.size) * (layout.masterBytes + layout.momentBytes);
    found.gradients += padded * layout.gradientBytes;
    found.gathered += padded * shards * layout.weightBytes;
    found.wholeGradients += padded * shards * layout.gradientBytes;
    found.part += padded * layout.gradientBytes;
  }
  return found;
}

function stateOf(layout, numbers) {
  const stages = numbers.map((number) => layout.division.stages[number]),
    isTied = layout.ends[4];
  const hasBoth = stages.some((one) => one.hasEmbedding) && stages.some((one) => one.hasOutput);
  const units = numbers
    .flatMap((number) => unitsOf(layout, number))
    .map(({record, kind}) => {
      const parameters = layout.data.shared.parameters[record[1]];
      // A tied weight on a stage with both ends is one weight, that of the embedding.
      return parameters
        .filter((one) => !(kind === "output" && isTied && hasBoth && one[3]))
        .map(([rows, width, isExpert, isVocabulary]) => ({
          rows,
          width,
          size: rows * width,
          isExpert: Boolean(isExpert),
          isTied: Boolean(isTied && !hasBoth && isVocabulary),
        }));
    });
  if (!layout.isFullySharded) return bufferedState(layout, units);
  const root = [];
  if (isTied && hasBoth) {
    root.push(...units[0], ...units.at(-1));
    units[0] = units[units.length - 1] = [];
  }
  return fullyShardedState(layout, units, root);
}

// What a chunk keeps, and the peaks of its passes beyond the state and other activations.
function chunkMemory(layout, records, buffers, held) {
  const units = records.map(memoryOf),
    allDeferred = sum(units.map((unit) => unit.deferred));
  let before = 0,
    forward = 0,
    backward = 0,
    waiting = allDeferred;
  units.forEach((unit, number) => {
    const buffer = buffers[number],
      own = layout.splits ? NO_BUFFERS : buffer;
    forward = Math.max(forward, before + Math.max(unit.forward + buffer.forward, buffer.start));
    waiting -= unit.deferred;
    const deferred = waiting + before,
      early = unit.backward + (number === units.length - 1 ? 0 : held);
    const late = unit.late_backward ? unit.late_backward + held + own.late_backward : 0;
    backward = Math.max(
      backward,
      deferred + early + Math.max(own.backward, unit.late_backward ? 0 : own.late_backward),
      deferred + late,
      own.experts_end ? deferred + unit.experts_end + held + own.experts_end : 0,
      deferred + unit.end + held + own.backward_end,
      deferred + unit.kept + held + buffer.start,
    );
    before += unit.kept;
  });
  const gathered = layout.sp ? 2 * layout.tp * layout.ends[3] : 0;
  return {kept: before, forward, backward, deferred: allDeferred, weightPass: allDeferred + gathered};
}

function contentMemory(layout, numbers) {
  const [, , positionTables, shard] = layout.ends,
    state = stateOf(layout, numbers);
  let place = 0,
    quantised = 0;
  const chunks = numbers.map((number) => {
    const records = unitsOf(layout, number).map(({record}) => record);
    const buffers = state.units.slice(place, (place += records.length));
    quantised += sum(records.map((record) => memoryOf(record).lasting));
    return chunkMemory(layout, records, buffers, layout.division.stages[number].hasOutput ? 0 : shard);
  });
  return {
    state: {
      weights: state.weights + quantised,
      gradients: state.gradients + (layout.splits ? state.everything : 0),
      optimizer: state.optimizer,
      tables: positionTables,
    },
    passes: ["forward", "backward", "weightPass"].flatMap((name) => chunks.map((one) => one[name])),
    held: [...chunks.map((one) => one.kept), ...chunks.map((one) => one.deferred), shard],
  };
}

const momentTables = new Map();

function cachedMoments(layout, stage) {
  const {schedule, pp, vp, microbatches} = layout,
    key = [schedule, pp, vp, microbatches, stage].join();
  if (!momentTables.has(key)) {
    if (momentTables.size > 2000) momentTables.clear();
    momentTables.set(key, momentsOf(schedule, pp, microbatches, vp, stage));
  }
  return momentTables.get(key);
}

// Bytes by kind at the peak of each stage, with the allowance.
function stageMemory(layout) {
  const contents = new Map();
  return layout.division.contents.map((numbers, stage) => {
    const key = numbers.join();
    if (!contents.has(key)) contents.set(key, contentMemory(layout, numbers));
    const {state, passes, held} = contents.get(key);
    let most = -1,
      kept = 0,
      pass = 0;
    for (const [number, ...counts] of cachedMoments(layout, stage)) {
      let beside = 0;
      for (let place = 0; place < held.length; place++) beside += counts[place] * held[place];
      if (passes[number] + beside > most) [most, kept, pass] = [passes[number] + beside, beside, passes[number]];
    }
    return {...state, "other microbatches": kept, "running pass": pass, allowance: ALLOWANCE};
  });
}

// --- both ------------------------------------------------------------------------------------------------------------

// What a page shows of a layout. Options have the names of flags; `refusal` (checks.js) says what is impossible.
function compose(data, options) {
  const layout = layoutOf(data, options),
    time = stepTime(layout),
    memory = stageMemory(layout);
  const needed = memory.map((kinds) => sum(Object.values(kinds)));
  const tightest = needed.indexOf(Math.max(...needed));
  const {job, cluster} = layout,
    tokens = layout.globalBatch * job.seq_length;
  const rate = tokens / time.seconds / layout.num_gpus;
  const peak = job.precision === "fp8" ? cluster.fp8_flops : cluster.bf16_flops;
  const work = layout.microbatches * time.slowest * time.larger;
  return {
    layout,
    memory_by_stage: memory,
    memory_bytes: memory[tightest],
    needed_bytes: needed[tightest],
    tightest_stage: tightest,
    step_time_s: time.seconds,
    parts: time.terms,
    passes: time.passes,
    growth: time.larger,
    tokens_per_s_per_gpu: rate,
    mfu: (rate * job.flops_per_token) / peak,
    bubble_fraction: time.terms.bubble / time.seconds,
    bubble_over_work: time.terms.bubble / work,
    bytes_sent: bytesSent(layout, placesOf(layout)),
  };
}

// Bytes that a rank sends in a step by axis, on the stage that sends most: in groups within its node, and across nodes.
function bytesSent(layout, places) {
  const {microbatches: m, pp, vp, ends, isSharded, isFullySharded, strategy, replicas, dp, cp} = layout,
    found = {};
  const [dense, experts] = largestParameters(layout),
    isEach = isFullySharded || strategy === "optim_grads";
  // Of each parameter: gathers and reductions among the shards, and twice a shard among its replicas.
  const gathered = layout.weightBytes * (isFullySharded ? 2 * m : isSharded ? 1 : 0);
  const reduced = layout.gradientBytes * (isEach ? m : isSharded ? 1 : 0);
  const ofGroup = (ranks) => {
    const shards = isSharded ? ranks / replicas : 1,
      copies = ranks / shards;
    return ((gathered + reduced) * (shards - 1)) / shards + (2 * layout.gradientBytes * (copies - 1)) / copies / shards;
  };
  const ofData = dense * ofGroup(dp * cp) + experts * ofGroup(layout.edp),
    ofStages = pp > 1 ? 2 * m * vp * ends[3] : 0;
  const add = (axis, bytes, isInside) => {
    if (bytes) found[axis] = {inside: isInside ? bytes : 0, across: isInside ? 0 : bytes};
  };
  add("dp", ofData, places.shards.inNode * replicas >= dp * cp && replicas === 1);
  add("pp", ofStages, places.stages.inNode === pp);
  const stages = layout.division.byStage.map((numbers) => {
    const sent = {};
    for (const number of numbers) {
      for (const [axis, bytes] of Object.entries(passesOf(layout, layout.division.like[number]).sent)) {
        sent[axis] ??= {inside: 0, across: 0};
        for (const place of ["inside", "across"]) sent[axis][place] += bytes[place] * layout.microbatches;
      }
    }
    return sent;
  });
  for (const sent of stages) {
    for (const [axis, bytes] of Object.entries(sent)) {
      const before = found[axis] ?? {inside: 0, across: 0};
      if (bytes.inside + bytes.across > before.inside + before.across) found[axis] = bytes;
    }
  }
  return found;
}
