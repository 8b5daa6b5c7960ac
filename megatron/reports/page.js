"use strict";
document.documentElement.classList.add("scripted");
// Hovering: every element with data-tip shows its text beside the pointer.
const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const target = event.target.closest && event.target.closest("[data-tip]");
  tip.style.display = target ? "block" : "none";
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const box = tip.getBoundingClientRect(), left = event.clientX + 14, top = event.clientY + 16;
  tip.style.left = Math.max(4, Math.min(left, innerWidth - box.width - 6)) + "px";
  tip.style.top = (top + box.height > innerHeight ? event.clientY - box.height - 10 : top) + "px";
});

// What is marked together: everything with the same data-link; and in a figure, the parts of a legend's entry.
let linked = [];
document.addEventListener("pointerover", (event) => {
  for (const element of linked) element.classList.remove("linked", "fading");
  linked = [];
  const find = (name) => event.target.closest && event.target.closest(`[data-${name}]`);
  const mark = (scope, name, value) => linked.push(...scope.querySelectorAll(`[data-${name}="${CSS.escape(value)}"]`));
  const source = find("link"), entry = find("part"), figure = entry && entry.closest("figure");
  if (source) mark(document, "link", source.dataset.link);
  if (figure && entry.closest(".legend")) mark(figure, "part", entry.dataset.part);
  for (const element of linked) element.classList.add("linked");
  if (figure && entry.closest(".legend")) linked.push(figure), figure.classList.add("fading");
});

// Buttons that copy the text beside them.
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", () => {
    const text = button.parentElement.querySelector("pre"), selection = getSelection();
    selection.selectAllChildren(text);
    const isCopied = document.execCommand("copy");
    if (isCopied) selection.removeAllRanges();
    button.textContent = isCopied ? "copied" : "selected";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
}

// One vertical line over all lanes of a timeline.
for (const lanes of document.querySelectorAll(".lanes")) {
  const cursor = lanes.querySelector(".cursor");
  if (!cursor) continue;
  lanes.addEventListener("pointermove", (event) => {
    const left = event.clientX - lanes.getBoundingClientRect().left;
    cursor.style.display = left > lanes.querySelector(".name").offsetWidth ? "block" : "none";
    cursor.style.left = left + "px";
  });
  lanes.addEventListener("pointerleave", () => (cursor.style.display = "none"));
}

// Tables: a click on a heading sorts by that column, a second click reverses.
for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const heading = event.target.closest("th");
    if (!heading) return;
    const column = heading.cellIndex, descends = heading.getAttribute("aria-sort") === "ascending";
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      const order = a === "" || b === "" ? (a === "") - (b === "") : a - b || (isNaN(a - b) ? a.localeCompare(b) : 0);
      return descends ? -order : order;
    });
    table.tBodies[0].append(...rows);
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descends ? "descending" : "ascending");
  });
}

// Light or dark: as the system, until the button is used.
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, now = root.dataset.theme;
  const isDark = now ? now === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
