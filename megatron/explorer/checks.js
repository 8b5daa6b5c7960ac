// What is impossible, in the sentences of the checks of a run (megatron/config/checks), with which a test compares them,
// and the nearest possible layout.

const DEFAULTS = {
  precision: "bf16",
  cluster: "h100",
  micro_batch_size: 1,
  tensor_model_parallel_size: 1,
  sequence_parallel: true,
  tp_comm_overlap: false,
  context_parallel_size: 1,
  cp_comm_type: "p2p",
  pipeline_model_parallel_size: 1,
  pipeline_schedule: "1f1b",
  num_virtual_stages_per_pipeline_rank: 1,
  account_for_embedding_in_pipeline_split: false,
  account_for_loss_in_pipeline_split: false,
  expert_model_parallel_size: 1,
  expert_tensor_parallel_size: 1,
  data_parallel_sharding_strategy: "optim",
  num_distributed_optimizer_instances: 1,
  recompute_granularity: "none",
  recompute_modules: [],
  recompute_num_layers: 1,
  overlap_grad_reduce: true,
  overlap_param_gather: true,
  grad_reduce_in_bf16: false,
  num_layers: null,
  tokens: 1e12,
  price_per_gpu_hour: null,
  gpu_memory_gb: null,
};

function unknownKey(data, options) {
  const known = new Set([...Object.keys(DEFAULTS), "model", "num_gpus", "seq_length", "global_batch_size"]);
  const key = Object.keys(options).find((one) => !known.has(one));
  if (key) return `${key} is not an option of this page: use one of ${[...known].sort().join(", ")}.`;
  const choices = {
    model: modelsOf(data),
    cluster: Object.keys(data.clusters),
    precision: ["bf16", "fp8"],
    cp_comm_type: data.choices.cp_comm_types,
    pipeline_schedule: Object.keys(SCHEDULES),
    recompute_granularity: ["none", "selective", "full"],
    data_parallel_sharding_strategy: ["no_shard", "optim", "optim_grads", "optim_grads_params"],
  };
  for (const [name, values] of Object.entries(choices)) {
    if (options[name] !== undefined && !values.includes(options[name])) {
      return `${name} ${options[name]} is not on this page: use one of ${values.join(", ")}.`;
    }
  }
  const number = Object.keys(options).find((name) => {
    if (options[name] === null) return false;
    const value = options[name],
      isCount = name.endsWith("_size") || name.startsWith("num_") || name === "seq_length";
    return isCount && !(Number.isInteger(value) && value >= 1);
  });
  return number ? `--${number.replaceAll("_", "-")} ${options[number]} must be an integer of at least 1.` : null;
}

const modelsOf = (data) => [...new Set(Object.values(data.jobs).map((job) => job.name))];
const lengthsOf = (data, model) => [
  ...new Set(
    Object.values(data.jobs)
      .filter((job) => job.name === model)
      .map((job) => job.seq_length),
  ),
];

// The layers that one pipeline stage or several do not divide evenly.
function layersRefusal(layers, pp, vp, countsEmbedding, countsLoss) {
  const counted = [...(countsEmbedding ? ["embedding"] : []), ...(countsLoss ? ["head"] : [])];
  const total = layers + counted.length,
    count = pp * vp;
  const units = `--num-layers ${layers}${counted.length ? ` (with ${counted.join(" and ")}: ${total})` : ""}`;
  const stages = vp === 1 ? `${pp} pipeline stages` : `${count} virtual stages (${pp} pipeline ranks x ${vp} chunks)`;
  if (total < count) {
    return (
      `${stages} are too many for ${units}, because each needs a layer: lower --pipeline-model-parallel-size` +
      `${vp > 1 ? " or the number of chunks" : ""}.`
    );
  }
  if (total % count === 0) return null;
  const uncounted = [];
  if (!countsEmbedding) uncounted.push("--account-for-embedding-in-pipeline-split");
  if (!countsLoss) uncounted.push("--account-for-loss-in-pipeline-split");
  const missing = (count - (total % count)) % count,
    ways = [];
  if (missing <= uncounted.length)
    ways.push(`add ${uncounted.slice(-missing).join(" and ")}, which makes ${total + missing}`);
  ways.push(
    `choose another --pipeline-model-parallel-size${vp === 1 ? "" : " (or number of chunks, where the schedule allows it)"}`,
  );
  if (vp === 1 && uncounted.length === 2) {
    ways.push("give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers");
  }
  return (
    `${units} does not divide evenly into ${stages}: ${ways.join(", ")}, or write the split as ` +
    "--pipeline-model-parallel-layout."
  );
}

function scheduleRefusal(schedule, chunks) {
  if (allowsChunks(schedule, chunks)) return null;
  const wanted = {one: "one chunk", several: "several chunks", two: "two chunks"}[SCHEDULES[schedule].chunks];
  const remedy =
    SCHEDULES[schedule].chunks === "one"
      ? "change --num-virtual-stages-per-pipeline-rank, or use --pipeline-schedule interleaved"
      : chunks === 1
        ? "add --num-virtual-stages-per-pipeline-rank 2, or more"
        : "change --num-virtual-stages-per-pipeline-rank, or use --pipeline-schedule interleaved";
  return `--pipeline-schedule ${schedule} needs ${wanted} per pipeline rank, not ${chunks}: ${remedy}.`;
}

// Why a run refuses the options, or why this page cannot compose them; null if it can.
function refusal(data, options) {
  const unknown = unknownKey(data, options);
  if (unknown) return unknown;
  const o = {...DEFAULTS, ...options},
    job = jobOf(data, o);
  if (!job) {
    return (
      `This page has no records of ${o.model} in ${o.precision} with --seq-length ${o.seq_length}: use ` +
      `${lengthsOf(data, o.model).join(" or ")}.`
    );
  }
  const tp = o.tensor_model_parallel_size,
    pp = o.pipeline_model_parallel_size,
    cp = o.context_parallel_size;
  const ep = o.expert_model_parallel_size,
    etp = o.expert_tensor_parallel_size,
    ofModel = tp * pp * cp;
  if (o.num_gpus % ofModel) {
    return (
      `${o.num_gpus} processes are not a multiple of --tensor-model-parallel-size ${tp} x ` +
      `--pipeline-model-parallel-size ${pp} x --context-parallel-size ${cp} = ${ofModel}: start a multiple of that many ` +
      "processes, or lower a size."
    );
  }
  const dp = o.num_gpus / ofModel,
    ofStage = tp * cp * dp;
  const divided = [
    ["--num-attention-heads", job.num_attention_heads],
    ["--num-query-groups", job.num_query_groups],
  ];
  for (const [flag, size] of divided) {
    if (size % tp) {
      return (
        `${flag} ${size} is not divisible by --tensor-model-parallel-size ${tp}: lower --tensor-model-parallel-size ` +
        `to a divisor of ${size}, or change ${flag}.`
      );
    }
  }
  if (job.num_experts && job.num_experts % ep) {
    return (
      `--num-experts ${job.num_experts} is not divisible by --expert-model-parallel-size ${ep}: lower ` +
      "--expert-model-parallel-size to a divisor."
    );
  }
  if (!job.num_experts && ep > 1) return "--expert-model-parallel-size needs a model with experts: choose one.";
  if (job.num_experts && ofStage % (ep * etp)) {
    return (
      `The ${ofStage} ranks of a pipeline stage are not a multiple of --expert-tensor-parallel-size ${etp} x ` +
      `--expert-model-parallel-size ${ep} = ${ep * etp}: lower one of them, or start more processes.`
    );
  }
  if (cp > 1 && job.seq_length % (2 * cp)) {
    return (
      `--seq-length ${job.seq_length} is not divisible by ${2 * cp}, as --context-parallel-size ${cp} requires: ` +
      "change one of them."
    );
  }
  const heads = job.num_query_groups / tp;
  if (cp > 1 && o.cp_comm_type === "a2a" && heads % cp) {
    return (
      `--cp-comm-type a2a needs the ${heads} key-value heads of a rank to be divisible by --context-parallel-size ` +
      `${cp}: use p2p or allgather, or a smaller size.`
    );
  }
  if (pp > 1) {
    const vp = chunksOf(o);
    const ends = [o.account_for_embedding_in_pipeline_split, o.account_for_loss_in_pipeline_split];
    const found = scheduleRefusal(o.pipeline_schedule, vp) ?? layersRefusal(job.num_layers, pp, vp, ...ends);
    if (found) return found;
  }
  if (o.tp_comm_overlap && tp > 1 && !o.sequence_parallel) {
    return (
      `--tp-comm-overlap with --tensor-model-parallel-size ${tp} needs --sequence-parallel: add it, or remove ` +
      "--tp-comm-overlap."
    );
  }
  if (job.num_experts && tp > 1 && !o.sequence_parallel) {
    return (
      `--num-experts with --tensor-model-parallel-size ${tp} needs --sequence-parallel, so that every rank routes ` +
      "other tokens: add it."
    );
  }
  const copies = o.num_distributed_optimizer_instances,
    isSharded = o.data_parallel_sharding_strategy !== "no_shard";
  if (copies > 1 && !isSharded) {
    return (
      `--num-distributed-optimizer-instances ${copies} needs a sharded strategy: add --use-distributed-optimizer, or ` +
      "remove the flag."
    );
  }
  if (dp % copies) {
    return (
      `--num-distributed-optimizer-instances ${copies} does not divide the data-parallel size ${dp}: use one of its ` +
      "divisors."
    );
  }
  if (job.num_experts && copies > 1 && (ofStage / (ep * etp)) % copies) {
    return (
      `--num-distributed-optimizer-instances ${copies} does not divide the ${ofStage / (ep * etp)} copies of the ` +
      `experts (${ofStage} ranks of a stage / ${ep * etp} ranks of a copy): use a divisor, or lower ` +
      "--expert-model-parallel-size."
    );
  }
  const unit = o.micro_batch_size * dp;
  if (o.global_batch_size < unit || o.global_batch_size % unit) {
    return (
      `--global-batch-size gives a global batch size of ${o.global_batch_size}, which is not divisible by ` +
      `--micro-batch-size ${o.micro_batch_size} x data-parallel size ${dp}: use multiples of ${unit}.`
    );
  }
  if (o.recompute_granularity === "full") {
    const most = longestChunk(job, o);
    if (o.recompute_num_layers > most) {
      return `--recompute-num-layers ${o.recompute_num_layers} exceeds the ${most} layers of a pipeline chunk: lower it.`;
    }
  }
  return recordRefusal(data, o);
}

// Chunks of the model on a stage, of which there are several.
const chunksOf = (o) => (SCHEDULES[o.pipeline_schedule].isV ? 2 : o.num_virtual_stages_per_pipeline_rank);

function longestChunk(job, o) {
  const pp = o.pipeline_model_parallel_size,
    vp = chunksOf(o);
  if (pp === 1) return job.num_layers;
  const ends = Number(o.account_for_embedding_in_pipeline_split) + Number(o.account_for_loss_in_pipeline_split);
  const size = (job.num_layers + ends) / (pp * vp);
  return pp * vp > ends ? size : size - 1;
}

// What the run would do, and the page has no record of.
function recordRefusal(data, o) {
  try {
    layoutOf(data, o);
    return null;
  } catch (error) {
    return `The layers of this layout were not rehearsed for this page: ${error.message}.`;
  }
}

// The nearest possible options: the first change of one option, then of two, from small changes to large ones, that is
// not refused. `kept` is the option that the reader has just set.
function nearest(data, options, kept) {
  const values = choicesOf(data, options),
    names = Object.keys(values).filter((name) => name !== kept);
  const distance = (name, value) => {
    const now = options[name];
    return typeof value === "number" ? Math.abs(Math.log2(value / now)) : 1;
  };
  const changes = names
    .flatMap((name) =>
      values[name]
        .filter((value) => value !== options[name])
        .map((value) => ({[name]: value, cost: distance(name, value)})),
    )
    .sort((one, other) => one.cost - other.cost);
  const apply = (...found) => {
    const changed = Object.assign({}, options, ...found);
    delete changed.cost;
    return refusal(data, changed) === null ? changed : null;
  };
  for (const change of changes) {
    const found = apply(change);
    if (found) return found;
  }
  const near = changes.slice(0, 40);
  for (const one of near) {
    for (const other of near) {
      const found = apply(one, other);
      if (found) return found;
    }
  }
  return kept === undefined ? null : nearest(data, options);
}

const powers = (least, most) => range(Math.log2(most / least) + 1).map((power) => least * 2 ** power);

// The values that each control offers.
function choicesOf(data, o) {
  const model = modelsOf(data).includes(o.model) ? o.model : modelsOf(data)[0];
  const job = Object.values(data.jobs).find((one) => one.name === model);
  return {
    tensor_model_parallel_size: data.choices.tensor_parallel,
    pipeline_model_parallel_size: range(32)
      .map((one) => one + 1)
      .filter((one) => [0, 1, 2].some((ends) => (job.num_layers + ends) % one === 0)),
    context_parallel_size: data.choices.context_parallel,
    cp_comm_type: data.choices.cp_comm_types,
    expert_model_parallel_size: job.num_experts ? data.choices.expert_parallel : [1],
    expert_tensor_parallel_size: job.num_experts ? data.choices.tensor_parallel : [1],
    micro_batch_size: data.choices.micro_batch_sizes,
    num_virtual_stages_per_pipeline_rank: range(Math.min(job.num_layers, 16)).map((one) => one + 1),
    account_for_embedding_in_pipeline_split: [false, true],
    account_for_loss_in_pipeline_split: [false, true],
    num_distributed_optimizer_instances: powers(1, 64),
    pipeline_schedule: Object.keys(SCHEDULES),
    recompute_num_layers: range(job.num_layers).map((one) => one + 1),
    tp_comm_overlap: [false, true],
    num_gpus: powers(1, 16384),
    global_batch_size: powers(8, 16384),
    seq_length: lengthsOf(data, model),
    precision: ["bf16", "fp8"],
    num_layers: [
      ...new Set([
        ...range(8).map((one) => Math.max(1, Math.round((job.num_layers * (one + 1)) / 8))),
        ...powers(2, 128),
      ]),
    ].sort((one, other) => one - other),
  };
}
