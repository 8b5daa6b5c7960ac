// The lessons' own tools on the page: pictures of collectives.js, with controls of their own and the sizes of the layout.

const RANK_COLOURS = [
  "blue",
  "orange",
  "teal",
  "violet",
  "red",
  "sky",
  "brown",
  "mint",
  "rose",
  "lilac",
  "sand",
  "slate",
];
const colourOf = (rank) => RANK_COLOURS[rank % RANK_COLOURS.length];
const MOST_RANKS = 12;
let ringTimer;

// A chunk with a stripe of each rank whose values it contains.
function cellBox(cell, isSent) {
  const css = `cell${cell ? "" : " empty"}${isSent ? " sent" : ""}`;
  const stripes = cell ? cell.from.map((rank) => element("i", {class: colourOf(rank)})) : [];
  return element(
    "span",
    {class: css, "data-tip": cell ? `chunk ${cell.chunk} of rank ${cell.from.join(" + ")}` : "nothing"},
    ...stripes,
  );
}

const rankRow = (label, cells, sent) =>
  element(
    "div",
    {class: "cells"},
    element("span", {class: "name"}, label),
    ...cells.map((cell) => cellBox(cell, cell !== null && sent === cell.chunk)),
  );

function slider(id, label, values, value, change) {
  const input = element("input", {
    type: "range",
    id,
    min: 0,
    max: values.length - 1,
    step: 1,
    value: values.indexOf(value),
  });
  const output = element("output", {for: id}, shown(value));
  input.addEventListener("input", () => {
    output.textContent = shown(values[input.value]);
    change(values[input.value]);
  });
  return element("div", {class: "control range"}, element("label", {for: id}, label), output, input);
}

function lesson(id, title, note, ...parts) {
  return element(
    "details",
    {class: "lesson", id},
    element("summary", {}, title),
    element("p", {class: "note"}, note),
    ...parts,
  );
}

function buildRing() {
  const values = {ranks: 4, gigabytes: 1, rate: 50, latency: 10},
    picture = element("div", {}),
    says = element("p", {class: "formula", id: "ring-says"});
  const step = element("input", {
    id: "ring-step",
    type: "range",
    min: 0,
    step: 1,
    value: 0,
    "aria-label": "step of the ring",
  });
  const play = element("button", {id: "ring-play", type: "button"}, "play");
  const draw = () => {
    const {ranks, gigabytes, rate, latency} = values,
      last = 2 * (ranks - 1),
      now = Math.min(Number(step.value), last);
    step.max = last;
    const {holds, sends} = ringAfter(ranks, now);
    picture.replaceChildren(...holds.map((cells, rank) => rankRow(`rank ${rank}`, cells, sends?.[rank])));
    const time = ringSeconds(gigabytes * 1e9, ranks, rate * 1e9, latency * 1e-6);
    const phase =
      now === last
        ? "every rank has the sum"
        : now < ranks - 1
          ? `reduce-scatter: step ${now + 1} of ${ranks - 1}`
          : `all-gather: step ${now - ranks + 2} of ${ranks - 1}`;
    says.textContent =
      `${phase}. Each rank sends 2 (n - 1) / n = ${((2 * (ranks - 1)) / ranks).toFixed(3)} times the bytes: ` +
      `2 x ${ranks - 1} x (${gigabytes} GB / ${ranks} / ${rate} GB/s + ${latency} us) = ${seconds(time)} (Patarasuk and Yuan 2009)`;
  };
  const stop = () => {
    clearInterval(ringTimer);
    ringTimer = null;
    play.textContent = "play";
  };
  play.addEventListener("click", () => {
    if (ringTimer) return stop();
    if (Number(step.value) >= Number(step.max)) step.value = 0;
    play.textContent = "pause";
    ringTimer = setInterval(() => {
      step.value = Number(step.value) + 1;
      draw();
      if (Number(step.value) >= Number(step.max)) stop();
    }, 600);
  });
  step.addEventListener("input", draw);
  const set = (name) => (value) => {
    values[name] = value;
    if (name === "ranks") step.value = 0;
    draw();
  };
  const controls = element(
    "div",
    {class: "choices"},
    slider(
      "ring-ranks",
      "Ranks",
      range(MOST_RANKS - 1).map((one) => one + 2),
      4,
      set("ranks"),
    ),
    slider("ring-size", "Size in GB", [0.001, 0.01, 0.1, 1, 10, 140], 1, set("gigabytes")),
    slider("ring-rate", "GB/s of a link", [25, 50, 100, 450, 900], 50, set("rate")),
    slider("ring-latency", "Latency in us", [0, 1, 10, 30, 100], 10, set("latency")),
  );
  draw();
  return lesson(
    "lesson-ring",
    "A ring all-reduce, chunk by chunk",
    "A row is a rank, a box a chunk; a stripe of a colour is that rank's " +
      "values in the sum. The framed chunk is sent to the next rank.",
    controls,
    picture,
    element("div", {class: "player"}, play, step),
    says,
  );
}

function buildCollectives() {
  const picture = element("div", {class: "columns"}),
    says = element("p", {class: "note"});
  const names = Object.keys(COLLECTIVES),
    choose = element("select", {"aria-label": "collective"}, ...names.map((name) => element("option", {}, name)));
  const draw = () => {
    const [before, after] = collective(choose.value, 4);
    const part = (title, ranks) =>
      element(
        "div",
        {},
        element("p", {class: "note"}, title),
        ...ranks.map((cells, rank) => rankRow(`rank ${rank}`, cells)),
      );
    picture.replaceChildren(part("before", before), part("after", after));
    says.textContent = COLLECTIVES[choose.value];
  };
  choose.addEventListener("change", draw);
  choose.value = "all-gather";
  draw();
  return lesson(
    "lesson-collectives",
    "The collectives",
    "What four ranks hold before and after.",
    choose,
    says,
    picture,
  );
}

// What follows the layout is drawn again with every change of it.
function drawZero() {
  const {layout} = result,
    ranks = Math.max(2, layout.cp * layout.dp);
  const parameters = sum(largestParameters(layout)),
    all = sum(Object.values(zeroBytes(parameters, ranks, 0)));
  const rows = range(4).map((stage) => {
    const parts = Object.entries(zeroBytes(parameters, ranks, stage)).map(([name, size]) => ({
      name,
      size,
      text: gib(size),
      css: MEMORY_COLOURS[name],
    }));
    const row = bar(parts),
      total = sum(parts.map((part) => part.size));
    row.style.width = `${(100 * total) / all}%`;
    return element(
      "div",
      {class: "stage"},
      element("div", {class: "name"}, stage ? `ZeRO-${stage}` : "none"),
      element("div", {class: "track"}, row),
      element("div", {class: "total"}, gib(total)),
    );
  });
  $("zero").replaceChildren(
    ...rows,
    element(
      "p",
      {class: "formula"},
      `The ${count(parameters)} parameters of a rank on ` +
        `the largest stage, which ${count(ranks)} ranks share: 2 bytes of weights, 4 of gradients, 12 of optimizer state (` +
        `arXiv 1910.02054, figure 1).`,
    ),
  );
}

// Column- and row-parallel products as rectangles whose parts belong to ranks.
function drawProducts() {
  const {job, tp, mbs} = result.layout,
    ranks = Math.max(tp, 2),
    tokens = (state.seq_length / state.context_parallel_size) * mbs;
  const {hidden_size: h, ffn_hidden_size: f} = job;
  const matrix = (title, shape, axis, css = "") =>
    element(
      "figure",
      {class: `matrix ${css}`},
      element(
        "div",
        {class: `parts ${axis}`},
        ...range(axis === "whole" ? 1 : ranks).map((rank) =>
          element("i", {class: axis === "whole" ? "grey" : colourOf(rank)}),
        ),
      ),
      element("figcaption", {}, title, element("small", {}, shape)),
    );
  const row = (...parts) =>
    element(
      "div",
      {class: "products"},
      ...parts.map((part) => (typeof part === "string" ? element("b", {}, part) : part)),
    );
  $("products").replaceChildren(
    row(
      matrix("X", `[${count(tokens)}, ${count(h)}]`, "whole"),
      "x",
      matrix("W up, by columns", `[${count(h)}, ${count(2 * f)} / ${ranks}]`, "by-columns"),
      "=",
      matrix("Y", `[${count(tokens)}, ${count(2 * f)} / ${ranks}]`, "by-columns"),
    ),
    row(
      matrix("SwiGLU(Y)", `[${count(tokens)}, ${count(f)} / ${ranks}]`, "by-columns"),
      "x",
      matrix("W down, by rows", `[${count(f)} / ${ranks}, ${count(h)}]`, "by-rows"),
      "=",
      matrix("a sum over ranks", `[${count(tokens)}, ${count(h)}]`, "whole"),
    ),
    element(
      "p",
      {class: "formula"},
      `Each of ${ranks} ranks has its columns of the first matrix and its rows of the second, so that only the last ` +
        `sum is communicated: ${bytes(2 * tokens * h)} by an all-reduce, or by a reduce-scatter and an all-gather with sequence parallelism (arXiv 1909.08053).`,
    ),
  );
}

function drawTriangle() {
  const ranks = Math.max(2, Math.min(result.layout.cp, MOST_RANKS)),
    size = 160;
  const draw = (isBalanced) => {
    const parts = contextParts(ranks, isBalanced),
      height = size / parts.length;
    const svg = element("svg", {class: "chart triangle", viewBox: `0 0 ${size} ${size}`});
    parts.forEach((rank, part) =>
      svg.append(
        element("rect", {
          class: colourOf(rank),
          x: 0,
          y: part * height,
          height,
          width: ((part + 0.5) / parts.length) * size,
          "data-tip": `rank ${rank}`,
        }),
      ),
    );
    const shares = contextShares(ranks, isBalanced),
      most = Math.max(...shares);
    return element(
      "figure",
      {},
      svg,
      element(
        "figcaption",
        {class: "note"},
        isBalanced ? "two parts from both ends: " : "neighbours: ",
        `shares ${shares.map((share) => percent(share)).join(", ")}; the slowest takes ${(most * ranks).toFixed(2)} times the mean`,
      ),
    );
  };
  $("triangle").replaceChildren(element("div", {class: "columns even"}, draw(false), draw(true)));
}

function drawFolding() {
  const {tp, cp, dp, grid, ep} = result.layout,
    job = result.layout.job;
  const rows = folding({tp, cp, dp, etp: job.num_experts ? grid.etp : tp, ep}).slice(0, 32);
  const axes = ["rank", "tp", "cp", "dp", "etp", "ep", "edp"];
  $("folding").replaceChildren(
    element(
      "div",
      {class: "scroll"},
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, ...axes.map((axis) => element("th", {class: "number"}, axis)))),
        element(
          "tbody",
          {},
          ...rows.map((row) =>
            element(
              "tr",
              {},
              ...axes.map((axis) =>
                element(
                  "td",
                  {class: "number"},
                  element("span", {class: axis === "ep" ? `badge-rank ${colourOf(row.ep)}` : ""}, String(row[axis])),
                ),
              ),
            ),
          ),
        ),
      ),
      element(
        "p",
        {class: "formula"},
        `The ${count(tp * cp * dp)} ranks of a stage are tp x cp x dp for dense layers, and etp x ep x edp for experts, from ` +
          `neighbouring ranks to distant ones (arXiv 2504.14960)${tp * cp * dp > 32 ? "; the first 32" : ""}.`,
      ),
    ),
  );
}

function buildLessons() {
  const place = (id) => element("div", {id});
  $("lessons").replaceChildren(
    buildRing(),
    buildCollectives(),
    lesson(
      "lesson-zero",
      "ZeRO 0 to 3",
      "What one rank keeps of weights, gradients and optimizer state, for this model and layout.",
      place("zero"),
    ),
    lesson(
      "lesson-products",
      "Column- and row-parallel products",
      "The MLP of this model; colours are ranks.",
      place("products"),
    ),
    lesson(
      "lesson-triangle",
      "The causal triangle under context parallelism",
      "A row is a part of the queries, its width the keys that it sees.",
      place("triangle"),
    ),
    lesson(
      "lesson-folding",
      "Folding of experts",
      "The same ranks on the axes of dense layers and of experts.",
      place("folding"),
    ),
  );
}

function drawLessons() {
  for (const draw of [drawZero, drawProducts, drawTriangle, drawFolding]) draw();
}
