// What the lessons draw, as data: collectives, a ring, ZeRO, parts of a product, the causal triangle, folding of experts.

// A cell is {chunk, from}: the sum of what the ranks in `from` had of a chunk; null is nothing.
const COLLECTIVES = {
  broadcast: "One rank sends everything to all.",
  scatter: "One rank sends each rank its chunk.",
  gather: "One rank receives a chunk of each.",
  "all-gather": "Every rank receives a chunk of each: weights before a layer under FSDP.",
  "reduce-scatter": "Every rank receives the sum of one chunk: gradients under ZeRO.",
  "all-reduce":
    "Every rank receives the sum of everything: gradients without sharding. It is a reduce-scatter and an all-gather.",
  "all-to-all": "Every rank sends each rank another chunk: tokens to their experts.",
};

// What each rank holds before and after: [rank][place] of cells.
function collective(name, ranks) {
  const all = range(ranks),
    own = (rank) => all.map((chunk) => ({chunk, from: [rank]}));
  const only = (rank, place) => all.map((chunk) => (chunk === place ? {chunk, from: [rank]} : null));
  const summed = (chunk) => ({chunk, from: all}),
    none = () => all.map(() => null);
  return {
    broadcast: [all.map((rank) => (rank ? none() : own(0))), all.map(() => own(0))],
    scatter: [all.map((rank) => (rank ? none() : own(0))), all.map((rank) => only(0, rank))],
    gather: [
      all.map((rank) => only(rank, rank)),
      all.map((rank) => (rank ? none() : all.map((chunk) => ({chunk, from: [chunk]})))),
    ],
    "all-gather": [all.map((rank) => only(rank, rank)), all.map(() => all.map((chunk) => ({chunk, from: [chunk]})))],
    "reduce-scatter": [all.map(own), all.map((rank) => all.map((chunk) => (chunk === rank ? summed(chunk) : null)))],
    "all-reduce": [all.map(own), all.map(() => all.map(summed))],
    "all-to-all": [all.map(own), all.map((rank) => all.map((sender) => ({chunk: rank, from: [sender]})))],
  }[name];
}

// A ring all-reduce after `step` of 2 (n - 1) steps: what each rank holds, and the chunk that each sends next.
function ringAfter(ranks, step) {
  let holds = range(ranks).map((rank) => range(ranks).map((chunk) => ({chunk, from: [rank]})));
  // Reduce-scatter: rank r sends the chunk that it has just added to; all-gather: the one that it has just received.
  const sends = (number) =>
    range(ranks).map((rank) => {
      const first = number < ranks - 1 ? rank - number : rank + 1 - (number - (ranks - 1));
      return ((first % ranks) + ranks) % ranks;
    });
  for (let number = 0; number < step; number++) {
    const sent = sends(number),
      next = holds.map((cells) => cells.slice());
    sent.forEach((chunk, rank) => {
      const target = (rank + 1) % ranks,
        mine = holds[rank][chunk].from;
      const from = number < ranks - 1 ? [...holds[target][chunk].from, ...mine] : mine;
      next[target][chunk] = {chunk, from: from.toSorted((a, b) => a - b)};
    });
    holds = next;
  }
  return {holds, sends: step < 2 * (ranks - 1) ? sends(step) : null};
}

// Seconds of a ring all-reduce of `size` bytes: each of 2 (n - 1) messages is of a chunk.
const ringSeconds = (size, ranks, rate, latency) => 2 * (ranks - 1) * (size / ranks / rate + latency);

// Bytes of a rank by ZeRO stage: weights, gradients and optimizer state of `parameters`.
const zeroBytes = (parameters, ranks, stage, gradient = 4) => ({
  weights: (2 * parameters) / (stage >= 3 ? ranks : 1),
  gradients: (gradient * parameters) / (stage >= 2 ? ranks : 1),
  optimizer: (12 * parameters) / (stage >= 1 ? ranks : 1),
});

// The rank of each of `parts` rows of the causal triangle: neighbours, or two parts from both ends.
function contextParts(ranks, isBalanced) {
  if (!isBalanced) return range(2 * ranks).map((part) => Math.floor(part / 2));
  return range(2 * ranks).map((part) => (part < ranks ? part : 2 * ranks - 1 - part));
}

// The share of the work of causal attention by rank: row i of n sees i + 1/2 of n columns.
function contextShares(ranks, isBalanced) {
  const shares = Array(ranks).fill(0),
    count = 2 * ranks;
  contextParts(ranks, isBalanced).forEach((rank, part) => (shares[rank] += (2 * part + 1) / count ** 2));
  return shares;
}

// The position of the ranks of a stage on the axes of dense layers and of experts.
function folding({tp, cp, dp, etp, ep}) {
  return range(tp * cp * dp).map((rank) => ({
    rank,
    tp: rank % tp,
    cp: Math.floor(rank / tp) % cp,
    dp: Math.floor(rank / tp / cp),
    etp: rank % etp,
    ep: Math.floor(rank / etp) % ep,
    edp: Math.floor(rank / etp / ep),
  }));
}
