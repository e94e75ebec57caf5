"use strict";
// What a run of hundreds of layers needs: filters, orders, and rows that a link opens.
const byId = (id) => document.getElementById(id);
const rows = [...byId("rows").children]; // the worst first
const heads = [...byId("head").children];

function filter() {
  const wanted = byId("filter").value.toLowerCase(), operand = byId("operand").value;
  for (const row of rows)
    row.hidden = !row.querySelector(".layer").textContent.toLowerCase().includes(wanted)
      || !row.querySelector(".operand").textContent.startsWith(operand)
      || (byId("problems").checked && row.classList.contains("l0"));
  byId("count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} casts`;
}
function sort(head, descending) {
  const isText = ["layer", "operand"].includes(head.className), sign = descending ? -1 : 1;
  const key = (row) => {
    const text = row.querySelector(`summary > .${head.className} > i`)?.textContent;
    if (isText) return row.querySelector(`.${head.className}`).textContent;
    return parseFloat(text.replace("inf", "Infinity"));
  };
  const order = (p, q) => isText ? sign * p.localeCompare(q, "en", { numeric: true })
    : Number.isNaN(p) - Number.isNaN(q) || (sign * (p - q) || 0); // what is not known comes last
  byId("rows").append(...rows.toSorted((a, b) => order(key(a), key(b))));
  for (const each of heads) each.dataset.order = each === head ? (descending ? "▾" : "▴") : "";
}
function openTarget() {
  const details = byId(location.hash.slice(1))?.closest("details");
  if (!details) return;
  details.hidden = false;
  details.open = true;
  details.scrollIntoView();
}
for (const head of heads) {
  head.title = byId(`explain-${head.className}`).textContent;
  const largestFirst = !["layer", "operand", "sqnr"].includes(head.className);
  if (head.matches("button")) head.onclick = () =>
    sort(head, head.dataset.order ? head.dataset.order === "▴" : largestFirst);
}
for (const id of ["filter", "operand", "problems"]) byId(id).oninput = filter;
addEventListener("hashchange", openTarget);
filter();
openTarget();
