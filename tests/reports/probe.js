const found = {errors: 0, title: document.title};
addEventListener("error", () => found.errors++);
addEventListener("securitypolicyviolation", () => found.errors++);
const numbers = (table, column) => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value));
found.sorted = [...document.querySelectorAll("table.sortable")].every((table) =>
  [...table.tHead.rows[0].cells].every((heading, column) => {
    if (!heading.classList.contains("number")) return true;
    heading.click();
    const up = numbers(table, column).filter((value) => !isNaN(value));
    heading.click();
    const down = numbers(table, column).filter((value) => !isNaN(value));
    const isSorted = up.every((value, index) => index === 0 || up[index - 1] <= value);
    return isSorted && JSON.stringify(down.reverse()) === JSON.stringify(up);
  }));
const hovered = document.querySelector("svg [data-tip]");
for (const kind of ["pointerover", "pointermove"])
  hovered.dispatchEvent(new PointerEvent(kind, {bubbles: true}));
found.tip = document.getElementById("tip").textContent;
const colour = () => getComputedStyle(document.body).backgroundColor;
found.colours = [colour()];
document.getElementById("theme").click();
found.colours.push(colour());
found.overflow = document.documentElement.scrollWidth - innerWidth;
const boxes = (selector) => [...document.querySelectorAll(selector)].map((one) => one.getBoundingClientRect());
found.clipped = boxes("main *").filter((box) => box.width > 0 && box.left < -1).length;
found.more = (() => { MORE })();
document.body.textContent = "";
document.body.dataset.found = JSON.stringify(found);
