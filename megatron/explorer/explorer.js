// The page: controls, what they give, and the address, which has the layout. `explorer.evaluate` is for scripts.

const $ = (id) => document.getElementById(id);
const GIB = 2 ** 30;
const MEMORY_COLOURS = {
  weights: "blue",
  gradients: "sky",
  optimizer: "violet",
  tables: "grey",
  "other microbatches": "orange",
  "running pass": "sand",
  allowance: "slate",
};
const MEMORY_MEANS = {
  weights: "weights in bf16, and quantised ones",
  gradients: "main gradients",
  optimizer: "main weights and two moments in fp32",
  tables: "rotations of all positions",
  "other microbatches": "activations of microbatches between their forward and backward pass",
  "running pass": "activations of the pass that runs at the peak, and its working memory",
  allowance: "CUDA context, NCCL and cuBLAS buffers, fragmentation",
};
const TERM_COLOURS = [
  "teal",
  "mint",
  "blue",
  "brown",
  "violet",
  "lilac",
  "rose",
  "grey",
  "sky",
  "sand",
  "slate",
  "orange",
  "red",
];
const TERM_MEANS = {
  products:
    "GEMMs of the layers on the slowest stage: FLOPs over the rate that GEMMs reach, a partial last wave of tiles, and the bytes that computation does not hide",
  attention: "FLOPs of causal attention over the rate that the kernel reaches at this length",
  "between products":
    "bytes that norms, activations, rotation and casts read and write, over the memory's rate that they reach",
  recompute: "what runs a second time in the backward pass",
  "tensor parallelism":
    "bytes of the collectives x (n - 1) / n over the rate of a ring; with overlap the exposed share",
  "context parallelism": "the exchange of keys and values, of which attention hides the most in a ring",
  "expert parallelism": "the exchange of tokens between the ranks of experts",
  gaps: "seconds of a layer without work on the GPU, and of a step in the host",
  "output layer": "final norm, output layer and loss, where they are on the slowest stage",
  "pipeline messages": "activations and gradients between stages",
  bubble: "the time in which the slowest stage waits for others",
  "data parallelism": "reduction of gradients and gathers of weights that no backward pass hides",
  optimizer: "bytes that the update reads and writes, over the memory's rate",
};
const CONTROLS = [
  [
    "Job",
    [
      ["model", "Model", "A preset; experts of mixtral and qwen-moe models are divided by EP."],
      ["cluster", "GPU and network", "Rates of a cluster file: FLOP/s, memory, NVLink, network adapters."],
      ["num_gpus", "GPUs", "All GPUs of the run."],
      ["seq_length", "Sequence length", "Tokens of a sequence."],
      ["global_batch_size", "Batch", "Sequences of a step, over all GPUs."],
      ["precision", "Precision", "bf16, or linear layers in FP8."],
      ["num_layers", "Layers", "Of the model, or another number of the same layers."],
      ["tokens", "Tokens of the run", "For days, GPU-hours and price."],
      ["price_per_gpu_hour", "Price of a GPU-hour", "In dollars; empty: that of the cluster file."],
    ],
  ],
  [
    "Model parallelism",
    [
      [
        "tensor_model_parallel_size",
        "TP",
        "Tensor parallelism: ranks that divide each weight matrix. They exchange activations in every layer, so they belong in one node.",
      ],
      [
        "sequence_parallel",
        "Sequence parallelism",
        "Norms and residual stream are divided by TP, too: less memory, the same traffic.",
      ],
      ["tp_comm_overlap", "Overlap of TP", "The collectives of TP run behind the products."],
      [
        "context_parallel_size",
        "CP",
        "Context parallelism: ranks that divide each sequence. They exchange keys and values.",
      ],
      [
        "cp_comm_type",
        "Exchange of CP",
        "Keys and values go around a ring (p2p), heads are exchanged for parts of the sequence (a2a), or all are gathered (allgather).",
      ],
      ["pipeline_model_parallel_size", "PP", "Pipeline parallelism: stages with a part of the layers each."],
      ["pipeline_schedule", "Schedule", "The order of forward and backward passes of the stages."],
      [
        "num_virtual_stages_per_pipeline_rank",
        "Chunks",
        "Parts of the model on a stage: more chunks, less idle time, more messages.",
      ],
      ["account_for_embedding_in_pipeline_split", "Embedding counts as a layer", "The first stage has one layer less."],
      ["account_for_loss_in_pipeline_split", "Output layer counts as a layer", "The last stage has one layer less."],
      ["expert_model_parallel_size", "EP", "Expert parallelism: ranks that divide the experts of a layer."],
      ["expert_tensor_parallel_size", "ETP", "Ranks that divide each expert."],
    ],
  ],
  [
    "Batch and state",
    [
      ["micro_batch_size", "Microbatch", "Sequences that pass through the model at a time."],
      [
        "data_parallel_sharding_strategy",
        "Sharding",
        "What the data-parallel ranks divide: nothing, optimizer state (ZeRO-1), gradients too (ZeRO-2), weights too (ZeRO-3, FSDP).",
      ],
      [
        "num_distributed_optimizer_instances",
        "Copies of shards",
        "Above 1: hybrid sharding (HSDP), shards within groups of ranks and copies of them.",
      ],
      ["overlap_grad_reduce", "Overlap of reductions", "Gradients are reduced behind the backward pass."],
      ["overlap_param_gather", "Overlap of gathers", "Weights are gathered ahead."],
      [
        "grad_reduce_in_bf16",
        "Gradients in bf16",
        "Half of the memory and traffic of gradients; changes the numerics.",
      ],
      ["recompute", "Recompute", "Activations that are computed again in the backward pass instead of kept."],
      ["recompute_num_layers", "Recomputed layers", "Layers of each chunk that are recomputed whole."],
    ],
  ],
];
const NAMES = {
  no_shard: "none",
  optim: "optimizer (ZeRO-1)",
  optim_grads: "gradients (ZeRO-2)",
  optim_grads_params: "weights (FSDP)",
};
const STARTS = [
  [
    "Llama 3 405B, as Meta ran it",
    {
      model: "llama3.1-405b",
      cluster: "h100",
      num_gpus: 16384,
      seq_length: 8192,
      global_batch_size: 2048,
      precision: "bf16",
      tensor_model_parallel_size: 8,
      pipeline_model_parallel_size: 16,
      pipeline_schedule: "interleaved",
      num_virtual_stages_per_pipeline_rank: 8,
      account_for_embedding_in_pipeline_split: true,
      account_for_loss_in_pipeline_split: true,
      data_parallel_sharding_strategy: "optim_grads",
    },
    "arXiv 2407.21783, table 4: TP 8, PP 16, 380 to 400 TFLOP/s per GPU; its FSDP keeps gathered weights, which is ZeRO-2",
  ],
  [
    "70B on 64 GPUs, our recipe",
    {
      model: "llama3.1-70b",
      cluster: "h100",
      num_gpus: 64,
      seq_length: 8192,
      global_batch_size: 512,
      precision: "bf16",
      tensor_model_parallel_size: 4,
      tp_comm_overlap: true,
      pipeline_model_parallel_size: 4,
      pipeline_schedule: "interleaved",
      num_virtual_stages_per_pipeline_rank: 5,
      recompute: "layernorm+mlp_act",
    },
    "examples/llama3_70b_h100.sh",
  ],
  [
    "8B on one node",
    {
      model: "llama3.1-8b",
      cluster: "h100",
      num_gpus: 8,
      seq_length: 8192,
      global_batch_size: 128,
      precision: "bf16",
      data_parallel_sharding_strategy: "optim_grads_params",
    },
    "FSDP over eight GPUs",
  ],
  [
    "8B on one node, as NVIDIA ran it",
    {
      model: "llama3.1-8b",
      cluster: "h100",
      num_gpus: 8,
      seq_length: 8192,
      global_batch_size: 128,
      precision: "bf16",
      context_parallel_size: 2,
    },
    "dgxc-benchmarking v25.01 (NeMo 24.09): CP 2 and ZeRO-1; a step was measured at 12.91 s",
  ],
  [
    "Mixtral 8x7B on 128 GPUs",
    {
      model: "mixtral-8x7b",
      cluster: "h100",
      num_gpus: 128,
      seq_length: 4096,
      global_batch_size: 1024,
      precision: "bf16",
      tensor_model_parallel_size: 2,
      pipeline_model_parallel_size: 4,
      expert_model_parallel_size: 8,
    },
    "TP 2, PP 4, EP 8",
  ],
];

let data, state, result;

// Recompute is one control: granularity and modules together.
function optionsOf(values) {
  const {recompute = "none", ...rest} = values;
  if (recompute === "none") return {...rest, recompute_granularity: "none", recompute_modules: []};
  if (recompute === "full") return {...rest, recompute_granularity: "full", recompute_modules: []};
  return {...rest, recompute_granularity: "selective", recompute_modules: recompute.split("+")};
}

function evaluate(options) {
  const given = options.recompute === undefined ? options : optionsOf(options);
  const reason = refusal(data, given);
  if (reason) return {fits: false, reason};
  const found = compose(data, given),
    limit = memoryLimit(given) * GIB;
  const fits = found.needed_bytes <= limit;
  return {
    fits,
    reason: fits ? null : `Stage ${found.tightest_stage} needs ${gib(found.needed_bytes)} of ${gib(limit)}.`,
    memory_bytes: found.memory_bytes,
    memory_by_stage: found.memory_by_stage,
    step_time_s: found.step_time_s,
    parts: found.parts,
    mfu: found.mfu,
    bubble_fraction: found.bubble_fraction,
    bytes_sent: found.bytes_sent,
    bubble_over_work: found.bubble_over_work,
    tokens_per_s_per_gpu: found.tokens_per_s_per_gpu,
    tightest_stage: found.tightest_stage,
    needed_bytes: found.needed_bytes,
    layout: found.layout,
    passes: found.passes,
    growth: found.growth,
  };
}

const memoryLimit = (options) => options.gpu_memory_gb ?? data.clusters[options.cluster ?? "h100"].memory_gib;
const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`;
const count = (number) => Math.round(number).toLocaleString("en");
const seconds = (value) =>
  value >= 100 ? value.toFixed(0) + " s" : value >= 1 ? value.toFixed(2) + " s" : (1000 * value).toFixed(1) + " ms";
const bytes = (value) =>
  value >= 1e12
    ? (value / 1e12).toFixed(2) + " TB"
    : value >= 1e9
      ? (value / 1e9).toFixed(2) + " GB"
      : (value / 1e6).toFixed(1) + " MB";
const percent = (share) => (100 * share).toFixed(1) + " %";
const shown = (value) => NAMES[value] ?? (typeof value === "number" ? value.toLocaleString("en") : String(value));

function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "rect", "line"].includes(tag);
  const made = isSvg ? document.createElementNS($("drawing").namespaceURI, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// --- controls --------------------------------------------------------------------------------------------------------

const NUMBERS = ["tokens", "price_per_gpu_hour"];
// What is trained, and on what: another run, not another layout of it.
const OF_THE_JOB = ["model", "cluster", "seq_length", "global_batch_size", "num_layers", ...NUMBERS];

function choices(name) {
  const fixed = {
    model: modelsOf(data),
    cluster: Object.keys(data.clusters),
    recompute: data.choices.recompute[state.model],
    sequence_parallel: [false, true],
    overlap_grad_reduce: [false, true],
    overlap_param_gather: [false, true],
    grad_reduce_in_bf16: [false, true],
    data_parallel_sharding_strategy: ["no_shard", "optim", "optim_grads", "optim_grads_params"],
  };
  return fixed[name] ?? choicesOf(data, state)[name];
}

const isSwitch = (name) => choices(name).length === 2 && choices(name)[0] === false;
const isRange = (name) => typeof choices(name)[0] === "number" && name !== "seq_length";
// The value of a control that is not set.
const usualOf = (name) => (name === "num_layers" ? data.jobs[jobName(state)]?.num_layers : undefined);
// What has no effect in this layout is not shown.
function isIdle(name) {
  const {tensor_model_parallel_size: tp, pipeline_model_parallel_size: pp} = state,
    job = data.jobs[jobName(state)];
  const ofPipeline = [
    "pipeline_schedule",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
  ];
  if (name === "sequence_parallel" || name === "tp_comm_overlap") return tp === 1;
  if (ofPipeline.includes(name)) return pp === 1;
  if (name === "cp_comm_type" && state.context_parallel_size === 1) return true;
  if (name === "num_virtual_stages_per_pipeline_rank") return pp === 1 || state.pipeline_schedule !== "interleaved";
  if (name.startsWith("expert_")) return !job?.num_experts;
  if (name === "recompute_num_layers") return state.recompute !== "full";
  if (name === "num_distributed_optimizer_instances") return state.data_parallel_sharding_strategy === "no_shard";
  return choices(name).length < 2 && !["model", "seq_length"].includes(name);
}

function buildControls() {
  $("controls").replaceChildren(
    ...CONTROLS.map(([title, controls]) =>
      element(
        "fieldset",
        {},
        element("legend", {}, title),
        ...controls.map(([name, label, help]) => buildControl(name, label, help)),
      ),
    ),
  );
}

function buildControl(name, label, help) {
  const change = (value) => set(name, value),
    id = `control-${name}`;
  let input;
  if (NUMBERS.includes(name)) {
    input = element("input", {
      id,
      type: "number",
      min: 0,
      step: "any",
      onchange: () => change(input.value === "" ? null : Number(input.value)),
    });
  } else if (isSwitch(name)) input = element("input", {id, type: "checkbox", onchange: () => change(input.checked)});
  else if (isRange(name)) {
    input = element("input", {id, type: "range", min: 0, step: 1, oninput: () => change(choices(name)[input.value])});
  } else {
    input = element("select", {
      id,
      onchange: () => {
        const value = choices(name)[input.selectedIndex];
        change(value);
      },
    });
  }
  const output = element("output", {for: id});
  const title = element("label", {for: id, "data-tip": help}, label);
  return element("div", {class: `control ${input.type ?? ""}`, "data-name": name}, title, output, input);
}

function showControls() {
  for (const one of document.querySelectorAll("#controls .control")) {
    const {name} = one.dataset,
      input = one.querySelector("input, select");
    if (NUMBERS.includes(name)) {
      if (document.activeElement !== input) input.value = state[name] ?? "";
      continue;
    }
    const values = choices(name);
    const value = state[name] ?? usualOf(name),
      place = values.indexOf(value);
    one.hidden = isIdle(name);
    if (input.type === "checkbox") input.checked = value;
    else if (input.type === "range") {
      input.max = values.length - 1;
      // A value between two choices is shown at the nearest one.
      input.value = place >= 0 ? place : values.filter((other) => other < value).length;
      input.setAttribute("aria-valuetext", shown(value));
    } else {
      input.replaceChildren(...values.map((other) => element("option", {selected: other === value}, shown(other))));
      input.selectedIndex = place;
    }
    one.querySelector("output").textContent = input.type === "range" ? shown(value) : "";
  }
}

function set(name, value) {
  state = {...state, [name]: value};
  if (name === "model") state = startOf(value, {...state, num_layers: null});
  if (name === "tokens" && !(value > 0)) state.tokens = DEFAULTS.tokens;
  if (name === "pipeline_schedule") state = withChunks(state);
  show(name);
}

// The schedule of the values with a number of chunks that it takes.
function withChunks(values) {
  const {chunks} = SCHEDULES[values.pipeline_schedule],
    now = values.num_virtual_stages_per_pipeline_rank;
  const allowed = {one: 1, two: 2, several: Math.max(2, now)}[chunks];
  return {...values, num_virtual_stages_per_pipeline_rank: allowed};
}

// Values that another model does not have become its own.
function startOf(model, values) {
  const lengths = lengthsOf(data, model),
    found = {...values, model};
  if (!lengths.includes(found.seq_length)) found.seq_length = lengths[0];
  const job = data.jobs[jobName(found)];
  found.num_layers ??= null;
  if (!job?.num_experts) Object.assign(found, {expert_model_parallel_size: 1, expert_tensor_parallel_size: 1});
  if (!data.choices.recompute[model].includes(found.recompute)) found.recompute = "none";
  return found;
}

// --- what is shown ---------------------------------------------------------------------------------------------------

let waiting;

function show(changed) {
  showControls();
  const options = optionsOf(state);
  result = evaluate(options);
  showVerdict(changed, options);
  const isPossible = result.step_time_s !== undefined;
  $("results").hidden = !isPossible;
  writeAddress();
  if (!isPossible) return;
  showFigures(options);
  showMemory(options);
  showStep();
  showTraffic();
  showCommand();
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    showChanges(options);
    showTimeline();
    drawLessons();
  }, 60);
}

function showVerdict(changed, options) {
  const place = $("verdict"),
    isPossible = result.step_time_s !== undefined;
  const mood = result.fits ? "good" : isPossible ? "warn" : "bad";
  const text = result.fits
    ? `Fits: stage ${result.tightest_stage}, the tightest, needs ${gib(result.needed_bytes)} of ${memoryLimit(options)} GiB.`
    : isPossible
      ? `Does not fit: ${result.reason}`
      : result.reason;
  place.className = mood;
  place.replaceChildren(element("span", {}, text));
  if (isPossible) {
    const summary = `${seconds(result.step_time_s)} a step, ${percent(result.mfu)} MFU`;
    place.append(element("b", {}, summary));
    return;
  }
  const button = element(
    "button",
    {
      type: "button",
      onclick: () => {
        const found = nearest(data, options, changed);
        if (!found) return void (button.textContent = "none is near");
        state = {
          ...state,
          ...Object.fromEntries(
            Object.keys(found)
              .filter((name) => name in state)
              .map((name) => [name, found[name]]),
          ),
        };
        show();
      },
    },
    "nearest possible layout",
  );
  place.append(button);
}

function showFigures(options) {
  const {num_gpus: gpus} = state,
    tokens = state.tokens,
    cluster = data.clusters[state.cluster];
  const steps = tokens / (state.global_batch_size * state.seq_length),
    hours = (steps * result.step_time_s * gpus) / 3600;
  const price = state.price_per_gpu_hour ?? cluster.price_per_gpu_hour;
  const priced = state.price_per_gpu_hour === null ? cluster.sources.price_per_gpu_hour : "set by you";
  const {job} = result.layout,
    peak = job.precision === "fp8" ? cluster.fp8_flops : cluster.bf16_flops;
  const rate = result.tokens_per_s_per_gpu;
  const figures = [
    [
      "Step",
      seconds(result.step_time_s),
      `${count(state.global_batch_size * state.seq_length)} tokens`,
      Object.entries(result.parts)
        .filter(([, value]) => value > 0)
        .map(([name, value]) => `${name} ${seconds(value)}`)
        .join(" + ") + ` = ${seconds(result.step_time_s)}`,
    ],
    [
      "MFU",
      percent(result.mfu),
      `${((result.mfu * peak) / 1e12).toFixed(0)} TFLOP/s of a GPU`,
      `FLOPs of a token x tokens / s of a GPU / peak = ${job.flops_per_token.toExponential(3)} x ${rate.toFixed(1)} / ${peak.toExponential(3)} = ${percent(result.mfu)}; causal attention counts half (PaLM, appendix B)`,
    ],
    [
      "Tokens per second",
      count(rate * gpus),
      `${count(rate)} of a GPU`,
      `batch x length / step = ${state.global_batch_size} x ${state.seq_length} / ${seconds(result.step_time_s)}`,
    ],
    [
      "Days",
      (hours / gpus / 24).toFixed(1),
      `for ${tokens.toExponential(1)} tokens, without failures`,
      `tokens / (batch x length) x step = ${tokens.toExponential(2)} / ${count(state.global_batch_size * state.seq_length)} x ${seconds(result.step_time_s)}`,
    ],
    [
      "GPU-hours",
      count(hours),
      price ? `${count(hours * price)} dollars` : "no price is known",
      `steps x step x GPUs / 3600 = ${count(steps)} x ${seconds(result.step_time_s)} x ${count(gpus)} / 3600${price ? `; ${price} dollars for an hour: ${priced}` : ""}`,
    ],
    [
      "Bubble",
      percent(result.bubble_fraction),
      `idle over work: ${percent(result.bubble_over_work)}`,
      `idle time of the slowest stage over the step = ${seconds(result.parts.bubble)} / ${seconds(result.step_time_s)}; over its work ${percent(result.bubble_over_work)} (arXiv 2104.04473 says (p - 1) / (v m))`,
    ],
  ];
  $("figures").replaceChildren(
    ...figures.map(([label, value, detail, formula]) =>
      element(
        "details",
        {class: "tile"},
        element(
          "summary",
          {},
          element("div", {class: "label"}, label),
          element("div", {class: "value"}, value),
          element("div", {class: "detail"}, detail),
        ),
        element("p", {class: "formula"}, formula),
      ),
    ),
  );
}

// A bar of parts, and a legend whose entries open what a part is.
function bar(parts) {
  const all = sum(parts.map((part) => part.size));
  const spans = parts
    .filter((part) => part.size > 0)
    .map((part) =>
      element("span", {
        class: part.css,
        style: `flex:${part.size / all} 1 0`,
        "data-tip": `${part.name}: ${part.text}`,
      }),
    );
  return element("div", {class: "share"}, ...spans);
}

const legendOf = (parts) =>
  element(
    "ul",
    {class: "legend"},
    ...parts
      .filter((part) => part.size > 0)
      .map((part) =>
        element(
          "li",
          {},
          element(
            "details",
            {},
            element("summary", {}, element("i", {class: part.css}), part.name, element("b", {}, part.text)),
            element("p", {class: "formula"}, part.meaning),
          ),
        ),
      ),
  );

function showMemory(options) {
  const limit = memoryLimit(options) * GIB,
    stages = result.memory_by_stage;
  const partsOf = (kinds) =>
    Object.entries(kinds).map(([name, size]) => ({
      name,
      size,
      text: gib(size),
      css: MEMORY_COLOURS[name],
      meaning: `${gib(size)}: ${memoryFormula(name, size)}`,
    }));
  const most = Math.max(limit, ...stages.map((kinds) => sum(Object.values(kinds))));
  const rows = stages.map((kinds, stage) => {
    const all = sum(Object.values(kinds)),
      row = bar(partsOf(kinds));
    row.style.width = `${(100 * all) / most}%`;
    const name = element("div", {class: `name${stage === result.tightest_stage ? " strong" : ""}`}, `stage ${stage}`);
    const line = element("div", {class: "limit", style: `left:${(100 * limit) / most}%`});
    const text = element("div", {class: `total${all > limit ? " over" : ""}`}, gib(all));
    return element("div", {class: "stage"}, name, element("div", {class: "track"}, row, line), text);
  });
  $("memory").replaceChildren(...rows);
  $("memory-legend").replaceChildren(legendOf(partsOf(result.memory_bytes)));
}

function memoryFormula(name, size) {
  const {layout} = result,
    shards = layout.shards[0];
  const each = {
    weights: layout.weightBytes,
    gradients: layout.gradientBytes,
    optimizer: layout.masterBytes + layout.momentBytes,
  };
  const divided = {
    weights: layout.isFullySharded ? "gathered beyond a unit's passes" : "of the rank",
    gradients: layout.strategy.startsWith("optim_grads") ? `of the rank / ${shards} ranks` : "of the rank",
    optimizer: layout.isSharded ? `of the rank / ${shards} ranks (arXiv 1910.02054)` : "of the rank",
  };
  const formulas = Object.fromEntries(
    Object.keys(each).map((kind) => [
      kind,
      `${count(size / each[kind])} parameters ${divided[kind]} x ${each[kind]} bytes`,
    ]),
  );
  return [MEMORY_MEANS[name], formulas[name]].filter(Boolean).join("; ");
}

function showStep() {
  const parts = TERMS.map((name, place) => ({
    name,
    size: result.parts[name],
    text: `${seconds(result.parts[name])}, ${percent(result.parts[name] / result.step_time_s)}`,
    css: TERM_COLOURS[place],
    meaning: `${TERM_MEANS[name]}. ${termFormula(name)}`,
  }));
  $("step").replaceChildren(bar(parts), legendOf(parts));
}

// The numbers of a part of the step, and the source of the rate that it depends on.
function termFormula(name) {
  const {layout, parts, growth} = result,
    {sources} = layout.cluster,
    m = layout.microbatches,
    value = parts[name];
  const source = {
    products: "bf16_flops",
    attention: "bf16_flops",
    "between products": "hbm_bytes_per_s",
    optimizer: "hbm_bytes_per_s",
    "tensor parallelism": "link_bytes_per_s",
    "context parallelism": "link_bytes_per_s",
    "expert parallelism": "link_bytes_per_s",
    "data parallelism": "network_bytes_per_s",
    "pipeline messages": "network_bytes_per_s",
  }[name];
  const once = ["bubble", "data parallelism", "optimizer", "gaps"].includes(name);
  const numbers = once
    ? `${seconds(value / growth)} a step`
    : `${count(m)} microbatches x ${seconds(value / m / growth)}`;
  const larger = growth > 1 ? ` x ${growth.toFixed(3)}, the growth of large runs,` : "";
  return `${numbers}${larger} = ${seconds(value)}${source && sources[source] ? `; ${sources[source]}` : ""}`;
}

function trafficFormula(axis, total) {
  const {layout} = result,
    m = layout.microbatches;
  if (axis === "pp") {
    return (
      `2 directions x ${count(m)} microbatches x ${layout.vp} chunks x ${bytes(layout.ends[3])} of the residual ` +
      `stream = ${bytes(total)}`
    );
  }
  if (axis === "dp") {
    const parameters = sum(largestParameters(layout));
    return (
      `${count(parameters)} parameters of the largest stage x ${(total / parameters).toFixed(2)} bytes: gathers of ` +
      `weights and reductions of gradients, (n - 1) / n of each (Patarasuk and Yuan 2009) = ${bytes(total)}`
    );
  }
  return (
    `${count(m)} microbatches x ${bytes(total / m)}: the recorded collectives of the layers, (n - 1) / n of the bytes ` +
    `of a gather or a reduce-scatter, twice that of an all-reduce (Patarasuk and Yuan 2009)`
  );
}

function showTraffic() {
  const axes = {
    tp: "tensor parallelism",
    cp: "context parallelism",
    ep: "expert parallelism",
    etp: "tensor parallelism of experts",
    dp: "data parallelism",
    pp: "pipeline",
  };
  const rows = Object.entries(result.bytes_sent).map(([axis, {inside, across}]) =>
    element(
      "tr",
      {},
      element(
        "td",
        {},
        element(
          "details",
          {},
          element("summary", {}, axes[axis]),
          element("p", {class: "formula"}, trafficFormula(axis, inside + across)),
        ),
      ),
      element("td", {class: "number"}, inside ? bytes(inside) : "–"),
      element("td", {class: "number"}, across ? bytes(across) : "–"),
    ),
  );
  $("traffic").replaceChildren(
    rows.length === 0
      ? "One GPU sends nothing."
      : element(
          "table",
          {},
          element(
            "thead",
            {},
            element(
              "tr",
              {},
              element("th", {}, "axis"),
              element("th", {class: "number"}, "inside a node"),
              element("th", {class: "number"}, "across nodes"),
            ),
          ),
          element("tbody", {}, ...rows),
        ),
  );
}

function commandLine() {
  const words = ["pretrain_llama.py"],
    o = optionsOf(state),
    flag = (name) => `--${name.replaceAll("_", "-")}`;
  const add = (name, value = o[name]) => words.push(value === true ? flag(name) : `${flag(name)} ${value}`);
  const {layout} = result;
  add("model");
  if (o.num_layers) add("num_layers");
  add("seq_length");
  add("global_batch_size");
  add("micro_batch_size");
  words.push("--bf16");
  if (o.precision === "fp8") words.push("--fp8-format hybrid");
  for (const name of ["tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"]) {
    if (o[name] > 1) add(name);
  }
  if (layout.cp > 1) add("cp_comm_type");
  if (layout.sp) add("sequence_parallel");
  if (layout.tpOverlap) add("tp_comm_overlap");
  if (layout.pp > 1) {
    add("pipeline_schedule");
    if (o.pipeline_schedule === "interleaved") add("num_virtual_stages_per_pipeline_rank");
    if (o.account_for_embedding_in_pipeline_split) add("account_for_embedding_in_pipeline_split");
    if (o.account_for_loss_in_pipeline_split) add("account_for_loss_in_pipeline_split");
  }
  if (layout.job.num_experts) {
    add("expert_model_parallel_size");
    add("expert_tensor_parallel_size");
    if (layout.ep > 1) words.push("--moe-token-dispatcher-type alltoall", "--rank-order tp-cp-ep-dp-pp");
  }
  add("data_parallel_sharding_strategy");
  if (o.num_distributed_optimizer_instances > 1) add("num_distributed_optimizer_instances");
  if (layout.overlapsReduction) add("overlap_grad_reduce");
  if (layout.overlapsGathers) add("overlap_param_gather");
  if (o.grad_reduce_in_bf16) add("grad_reduce_in_bf16");
  if (o.recompute_granularity !== "none") add("recompute_granularity");
  if (o.recompute_granularity === "full")
    words.push("--recompute-method block", `--recompute-num-layers ${o.recompute_num_layers}`);
  if (o.recompute_granularity === "selective") words.push(`--recompute-modules ${o.recompute_modules.join(" ")}`);
  return words;
}

function showCommand() {
  $("command")
    .querySelector("pre")
    .replaceChildren(...commandLine().flatMap((word) => [element("span", {}, word), " "]));
}

// What one step up or down of each control changes.
function showChanges(options) {
  const rows = [];
  const base = result;
  for (const [, controls] of CONTROLS) {
    for (const [name, label] of controls) {
      if (OF_THE_JOB.includes(name) || isIdle(name)) continue;
      const values = choices(name),
        place = values.indexOf(state[name]);
      for (const value of new Set([values[place - 1], values[place + 1]])) {
        if (value === undefined || place < 0) continue;
        const changed = {...state, [name]: value};
        const found = evaluate(optionsOf(name === "pipeline_schedule" ? withChunks(changed) : changed));
        if (found.step_time_s === undefined) continue;
        const time = found.step_time_s - base.step_time_s,
          memory = found.needed_bytes - base.needed_bytes;
        rows.push([
          time,
          element(
            "tr",
            {class: found.fits ? "" : "over", onclick: () => set(name, value)},
            element("td", {}, element("button", {type: "button"}, `${label}: ${shown(value)}`)),
            element("td", {class: "number"}, `${time < 0 ? "−" : "+"}${seconds(Math.abs(time))}`),
            element("td", {class: "number"}, `${memory < 0 ? "−" : "+"}${gib(Math.abs(memory))}`),
            element("td", {}, found.fits ? "fits" : "does not fit"),
          ),
        ]);
      }
    }
  }
  rows.sort((one, other) => one[0] - other[0]);
  $("changes").replaceChildren(
    element(
      "table",
      {},
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          element("th", {}, "change"),
          element("th", {class: "number"}, "step"),
          element("th", {class: "number"}, "memory"),
          element("th", {}, ""),
        ),
      ),
      element("tbody", {}, ...rows.map(([, row]) => row)),
    ),
  );
}

// --- the schedule ----------------------------------------------------------------------------------------------------

const MOST_SHOWN = 2200;
let playing;

function showTimeline() {
  clearInterval(playing);
  playing = null;
  const {layout, passes} = result,
    place = $("timeline"),
    {pp, vp, schedule, splits} = layout;
  $("schedule").hidden = pp === 1;
  if (pp === 1) return;
  const most = Math.max(2 * pp, Math.floor(MOST_SHOWN / (pp * vp * (splits ? 3 : 2))));
  const microbatches = Math.min(layout.microbatches, most);
  const actions = cachedProgram(schedule, pp, vp, microbatches),
    last = pp * vp - 1;
  const duration = (kind, number) => {
    const times = passes[number === 0 ? 0 : number === last ? 2 : 1];
    return splits || kind === F ? times[kind] : times[1] + times[2];
  };
  const run = runProgram(actions, pp, duration),
    height = Math.max(10, Math.min(24, 340 / pp));
  const width = 1000,
    scale = width / run.makespan,
    names = ["forward", "backward", "weight"];
  const svg = element("svg", {
    class: "chart",
    viewBox: `0 0 ${width} ${height * pp}`,
    preserveAspectRatio: "none",
    style: `height:${height * pp}px`,
  });
  const rects = actions.map(([stage, , kind, , microbatch, chunk], number) =>
    element("rect", {
      class: `pass ${names[kind]}`,
      x: (run.starts[number] * scale).toFixed(2),
      y: stage * height + 1,
      width: Math.max(0.4, (run.ends[number] - run.starts[number]) * scale).toFixed(2),
      height: height - 2,
      "fill-opacity": vp > 1 ? 1 - (0.55 * chunk) / vp : 1,
      "data-tip": `stage ${stage}: ${names[kind]} of microbatch ${microbatch}, chunk ${chunk}\n${seconds(run.starts[number])} to ${seconds(run.ends[number])}`,
    }),
  );
  const cursor = element("line", {
    class: "axis",
    y1: 0,
    y2: height * pp,
    x1: 0,
    x2: 0,
    "vector-effect": "non-scaling-stroke",
  });
  svg.append(...rects, cursor);
  const left = layout.microbatches - microbatches;
  $("timeline-note").textContent =
    `${schedule}, ${pp} stages${vp > 1 ? ` of ${vp} chunks` : ""}, ${microbatches} microbatches` +
    (left ? ` of ${layout.microbatches}: the others repeat the middle` : "") +
    ". A row is a stage; time runs to the right.";
  place.replaceChildren(svg);
  const order = range(actions.length).sort((a, b) => run.starts[a] - run.starts[b]),
    slider = $("moment");
  slider.max = actions.length;
  const moment = (shownActions) => {
    slider.value = shownActions;
    const now = shownActions < actions.length ? run.starts[order[shownActions]] : run.makespan;
    const live = Array(pp).fill(0);
    rects.forEach((rect, number) =>
      rect.classList.toggle("later", run.starts[number] >= now && shownActions < actions.length),
    );
    actions.forEach(([stage, , kind], number) => {
      if (run.ends[number] <= now && kind === F) live[stage] += 1;
      if (run.ends[number] <= now && kind === (splits ? W : B)) live[stage] -= 1;
    });
    cursor.setAttribute("x1", now * scale);
    cursor.setAttribute("x2", now * scale);
    $("live").textContent = `at ${seconds(now)}: activations of ${live.join(" ")} passes live on stages 0 to ${pp - 1}`;
  };
  slider.oninput = () => moment(Number(slider.value));
  $("play").onclick = () => {
    if (playing) {
      clearInterval(playing);
      playing = null;
      $("play").textContent = "play";
      return;
    }
    $("play").textContent = "pause";
    let next = Number(slider.value) >= actions.length ? 0 : Number(slider.value);
    playing = setInterval(() => {
      moment(next);
      next += Math.max(1, Math.ceil(actions.length / 300));
      if (next > actions.length) {
        moment(actions.length);
        $("play").click();
      }
    }, 40);
  };
  $("play").textContent = "play";
  moment(actions.length);
}

// --- the address -----------------------------------------------------------------------------------------------------

function writeAddress() {
  const words = Object.entries(state)
    .filter(
      ([name, value]) => value !== DEFAULTS[name] && !(name === "recompute" && value === "none") && value !== null,
    )
    .map(([name, value]) => `${name}=${value}`);
  history.replaceState(null, "", "#" + words.join("&"));
}

// The values of a fragment; a key that this page does not know is named.
function readAddress(fragment) {
  const found = {},
    problems = [];
  for (const word of decodeURIComponent(fragment).replace(/^#/, "").split("&").filter(Boolean)) {
    const [name, text] = word.split("="),
      known = name in DEFAULTS || ["model", "num_gpus", "seq_length", "global_batch_size", "recompute"].includes(name);
    if (!known || ["recompute_granularity", "recompute_modules"].includes(name))
      problems.push(`${name} in the address is not an option of this page: it is left out.`);
    else
      found[name] =
        text === "true" ? true : text === "false" ? false : text !== "" && !isNaN(text) ? Number(text) : text;
  }
  return {found, problems};
}

function start(values, problems = []) {
  const first = modelsOf(data)[0],
    {recompute_granularity: _, recompute_modules: __, ...defaults} = DEFAULTS;
  state = {...defaults, recompute: "none", model: first, num_gpus: 64, global_batch_size: 512, ...values};
  if (!modelsOf(data).includes(state.model)) {
    problems.push(`${state.model} is not on this page: use one of ${modelsOf(data).join(", ")}.`);
    state.model = first;
  }
  state.seq_length = values.seq_length ?? lengthsOf(data, state.model)[0];
  $("problems").replaceChildren(...problems.map((text) => element("p", {class: "remark"}, text)));
  buildControls();
  buildLessons();
  show();
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

if (typeof document !== "undefined") {
  unpack(PACKED).then((found) => {
    data = found;
    window.explorer = {evaluate, nearest: (options) => nearest(data, options), data};
    $("starts").replaceChildren(
      ...STARTS.filter(([, values]) => data.jobs[jobName(values)]).map(([name, values, source]) =>
        element("button", {type: "button", "data-tip": source, onclick: () => start(values)}, name),
      ),
    );
    const {found: values, problems} = readAddress(location.hash);
    const usual = STARTS.find(([, one]) => data.jobs[jobName(one)]);
    start(Object.keys(values).length ? values : usual ? usual[1] : {}, problems);
    document.documentElement.dataset.ready = "";
  });
}
