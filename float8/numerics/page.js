// The page: health, key figures, the table, and what people do with them. pictures.js comes first.
const CHUNK = 60; // rows that are drawn at once

// --- what is shown

const COLUMNS = [
  { key: "layer", label: "Layer", type: "text" },
  { key: "operand", label: "Operand", type: "text" },
  { key: "format", label: "Format", type: "text", hidden: true }, // in the operand's cell
  { key: "sqnr", label: "SQNR dB", show: (row) => decibel(row.sqnr) },
  { key: "flushed", label: "Flushed", show: (row) => percent(row.flushed), worst: true },
  { key: "saturated", label: "Saturated", show: (row) => percent(row.saturated), worst: true },
  { key: "amax", label: "Amax", show: (row) => number(row.amax), worst: true },
  { key: "scale_max", label: "Scale", show: (row) => number(row.scale_max), worst: true },
  { key: "kurtosis", label: "Kurtosis", show: (row) => number(row.kurtosis), worst: true },
  { key: "staleness", label: "Stale", show: (row) => octaves(row.staleness), worst: true },
];
const CAUSES = ["sqnr", "saturated", "flushed", "sqnr", "staleness"]; // where each rule looks
const PICTURES = 3; // they stand before this column
const pictures = many ? ["Powers of two", "Over the run"] : ["Powers of two"];
const state = { step: 0, sort: "sqnr", desc: false, filter: "", operand: "", problems: false };
const opened = new Set();
let shown = [], drawn = 0;

function visible() {
  const wanted = state.filter.toLowerCase();
  const sign = state.desc ? -1 : 1;
  const missing = (value) => value === null || Number.isNaN(value);
  return rowsOf(state.step)
    .filter((row) => row.layer.toLowerCase().includes(wanted))
    .filter((row) => !state.operand || row.operand === state.operand)
    .filter((row) => !state.problems || row.level > 0)
    .sort((a, b) => {
      const p = sortKey(a), q = sortKey(b);
      if (missing(p) || missing(q)) return missing(p) - missing(q); // what is not known comes last
      const order = typeof p === "string" ? p.localeCompare(q, "en", { numeric: true }) : p - q;
      return sign * (order || 0); // two infinities are equal
    });
}
// What met inf or NaN is worse than any SQNR of its finite elements.
const sortKey = (row) => (state.sort === "sqnr" && row.nonfinite ? -Infinity : row[state.sort]);
function castRow(row) {
  const open = el("button", { type: "button", "aria-expanded": "false" },
    el("span", { class: "chevron", "aria-hidden": "true" }, "▸"),
    el("span", {}, ...breakable(row.layer || "(the model itself)")));
  const second = row.gemm === USUAL[row.operand] ? [] : [`for ${row.gemm}`];
  const cast = [row.format.toUpperCase(), row.scaling, row.granularity, ...second].join(" ");
  const tr = el("tr", { class: "cast", "data-cast": row.cast },
    el("td", { class: "layer" }, open),
    el("td", { class: "text operand" }, row.operand, el("span", { class: "tag" }, cast)));
  for (const column of COLUMNS.slice(3)) tr.append(cellOf(row, column));
  const small = phone() ? at("scroll").clientWidth - 26 : 0;
  const drawn = [histogram(row, small || 132, 30, false)];
  if (many) drawn.push(lines([{ name: "cast", values: trends[row.cast] }], small || 84, 28, false));
  tr.children[PICTURES].before(...drawn.map((picture) => el("td", { class: "wide" }, picture)));
  open.addEventListener("click", () => {
    if (opened.delete(row.cast)) {
      tr.nextElementSibling.remove();
      open.setAttribute("aria-expanded", "false");
    } else unfold(tr, row);
  });
  return tr;
}
function cellOf(row, column) {
  const first = column.key === "sqnr"; // where the badge stands
  const isNoisy = first && row.sqnr !== null && row.sqnr < run.formats[row.format].noisy;
  const concerned = isNoisy || CAUSES.some((key, i) => key === column.key && row.problems & (1 << i));
  const several = column.key === "scale_max" && row.scale_min !== row.scale_max;
  return el("td", { "data-label": column.label, class: `level-${concerned ? row.level : 0} ${column.key}` },
    el("span", { class: "value" }, column.show(row)),
    first && row.level ? el("span", { class: `badge level-${row.level}` }, LOOKS[row.level]) : null,
    first && row.nonfinite ? el("span", { class: "tag" }, `${counted(row.nonfinite)} inf or NaN`) : null,
    several ? el("span", { class: "tag" }, `from ${number(row.scale_min)}`) : null);
}
const phone = () => matchMedia("(max-width: 760px)").matches;
function unfold(tr, row) {
  opened.add(row.cast);
  tr.querySelector("button").setAttribute("aria-expanded", "true");
  const cell = el("div");
  const room = at("scroll").clientWidth - (phone() ? 26 : 30);
  cell.style.width = `${room}px`; // not the table's, which may be wider than its place
  tr.after(el("tr", { class: "detail" },
    el("td", { colspan: at("head").children.length }, cell)));
  const width = Math.min(phone() ? room : (room - 18) * 0.6, 720);
  const range = rangeOf(row);
  const facts = [
    ["elements", `${counted(row.elements)} in ${plural(row.calls, "call")}`],
    ["zeros, not finite", `${counted(row.zeros)}, ${counted(row.nonfinite)}`],
    ["amax", number(row.amax)],
    ["scale", scales(row)],
    ["precise between", ...power(range.normal), " and ", ...power(range.saturated)],
    ["zero below", ...power(range.flushed)],
    ["SQNR", `${decibel(row.sqnr)} of ${run.formats[row.format].expected} dB`],
    ["kurtosis", number(row.kurtosis)],
  ];
  if (row.staleness !== null) facts.push(["stale by", `${octaves(row.staleness)} octaves`]);
  const list = el("dl");
  for (const [name, ...values] of facts)
    list.append(el("dt", {}, name), el("dd", {}, ...values));
  const figure = el("figure", {}, histogram(row, width, 210, true),
    el("figcaption", {}, "Share of the elements by magnitude, before the cast (logarithmic)"));
  if (many)
    figure.append(lines([{ name: "SQNR", values: trends[row.cast] }], width, 110, true));
  cell.append(el("div", { class: "panes" }, figure, list));
  run.kinds.forEach((kind, i) => {
    if (row.problems & (1 << i))
      cell.append(el("p", { class: "advice" }, el("b", {}, `It ${kind.one}. `),
        kind.advice));
  });
}
function drawMore() {
  for (const row of shown.slice(drawn, drawn + CHUNK)) {
    const tr = castRow(row);
    at("body").append(tr);
    if (opened.has(row.cast)) unfold(tr, row);
  }
  drawn = Math.min(drawn + CHUNK, shown.length);
  at("more").hidden = drawn === shown.length;
  at("more").textContent = `Show more (${counted(shown.length - drawn)} left)`;
}
function drawTable() {
  shown = visible();
  drawn = 0;
  at("body").replaceChildren();
  drawMore();
  at("count").textContent = `${counted(shown.length)} of ${counted(rowsOf(state.step).length)} casts`;
  for (const th of at("head").children) {
    const mine = th.dataset.key === state.sort;
    if (mine) th.setAttribute("aria-sort", state.desc ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
    const arrow = th.querySelector(".arrow");
    if (arrow) arrow.textContent = mine ? (state.desc ? "▾" : "▴") : "";
  }
  at("sort").value = `${state.sort} ${state.desc ? "desc" : "asc"}`;
}
const levelOf = (step) =>
  Math.max(0, ...run.snapshots[step].problems.map((problem) => problem.level));
function drawHealth() {
  const snapshot = run.snapshots[state.step];
  const level = levelOf(state.step);
  const titles = ["Healthy", "Worth a look", "Something is wrong"];
  const title = snapshot.rows.length ? titles[level] : "Nothing seen";
  at("health").className = `card level-${level}`;
  at("health").replaceChildren(el("h2", {}, many ? `${title} at ${nameOf(state.step)}` : title),
    el("p", {}, snapshot.summary));
  const list = el("div", { class: "findings" });
  for (const problem of snapshot.problems) {
    const show = el("button", { type: "button", class: "link" }, "Show it");
    show.addEventListener("click", () => reveal(problem.cast));
    list.append(el("div", { class: "finding" },
      el("h3", {}, el("span", { class: `badge level-${problem.level}` }, LOOKS[problem.level]),
        problem.title),
      el("p", {}, `${problem.text} `, show),
      el("p", { class: "muted" }, run.kinds[problem.kind].advice)));
  }
  if (snapshot.problems.length) at("health").append(list);
  if (snapshot.skipped.length)
    at("health").append(el("details", { class: "finding" },
      el("summary", {}, `${plural(snapshot.skipped.length, "layer")} not seen, or not wholly`),
      ...snapshot.skipped.map(([layer, why]) => el("p", {}, el("b", {}, layer), `: ${why}`))));
}
function reveal(cast) {
  Object.assign(state, { filter: casts[cast].layer, operand: casts[cast].operand, problems: false });
  opened.add(cast);
  draw();
  at("casts").scrollIntoView({ block: "start" });
}
function drawTiles() {
  const rows = rowsOf(state.step);
  const worst = (key) => rows.reduce((best, row) =>
    row[key] !== null && (best === null || row[key] > best[key]) ? row : best, null);
  const known = rows.filter((row) => row.sqnr !== null);
  const lowest = known.reduce((best, row) => (best && best.sqnr <= row.sqnr ? best : row), null);
  const place = (row) => (row ? `${row.layer} ${row.operand}` : "");
  const most = (key) => {
    const row = worst(key);
    return row && row[key] > 0 ? [percent(row[key]), place(row)] : ["0 %", "in every cast"];
  };
  const bad = rows.filter((row) => row.nonfinite > 0);
  const layers = new Set(rows.map((row) => row.layer)).size;
  const tiles = [
    ["worst SQNR", lowest ? withUnit(lowest.sqnr) : "–", place(lowest)],
    ["median SQNR", withUnit(median(finite(rows.map((row) => row.sqnr)))), "of all casts"],
    ["most saturated", ...most("saturated")],
    ["most flushed", ...most("flushed")],
    ["inf or NaN", counted(bad.reduce((sum, row) => sum + row.nonfinite, 0)),
      bad.length ? place(bad[0]) : "elements"],
    ["layers", counted(layers), plural(rows.length, "cast")],
  ];
  at("tiles").replaceChildren(...tiles.map(([name, value, where]) =>
    el("div", { class: "tile" }, el("span", { class: "small muted" }, name), el("b", {}, value),
      el("span", { class: "small muted" }, ...breakable(where)))));
}
// Neighbouring snapshots that are as bad, as [first, last, level].
function troubles() {
  const found = [];
  run.snapshots.forEach((_, step) => {
    const level = levelOf(step), before = found.at(-1);
    if (!level) return;
    if (before && before[1] === step - 1 && before[2] === level) before[1] = step;
    else found.push([step, step, level]);
  });
  return found;
}
function drawTroubles() {
  const found = troubles(), parts = ["Wants a look:"];
  for (const [first, last, level] of found.slice(0, 12)) {
    const name = first === last ? nameOf(first) : `${nameOf(first)} to ${nameOf(last)}`;
    const link = el("button", { type: "button", class: "link" }, name);
    link.addEventListener("click", () => go(first));
    const badge = el("span", { class: `badge level-${level}` }, LOOKS[level]);
    parts.push(" ", el("span", { class: "trouble" }, link, " ", badge));
  }
  if (found.length > 12) parts.push(` and ${found.length - 12} more`);
  at("troubled").replaceChildren(...parts);
  at("troubled").hidden = !found.length;
}
function drawRun() {
  if (!many) return;
  const values = run.snapshots.map((_, step) => finite(trends.map((trend) => trend[step])));
  const least = (some) => some.reduce((a, b) => Math.min(a, b), Infinity);
  const series = [
    { name: "worst", values: values.map((some) => (some.length ? least(some) : null)) },
    { name: "median", values: values.map(median) },
  ];
  at("run-chart").replaceChildren(el("h2", {}, "SQNR over the run"),
    lines(series, at("run-chart").clientWidth || 320, 150, true));
  drawTroubles();
  at("step").value = state.step;
  at("step-name").textContent = nameOf(state.step);
  at("earlier").disabled = state.step === 0;
  at("later").disabled = state.step === run.snapshots.length - 1;
}
function draw() {
  for (const id of ["filter", "operand"]) at(id).value = state[id];
  at("problems").checked = state.problems;
  drawRun();
  drawHealth();
  drawTiles();
  drawTable();
}

// --- what people do

function sortBy(key, desc) {
  Object.assign(state, { sort: key, desc });
  drawTable();
}
for (const column of COLUMNS) {
  const button = el("button", { type: "button" }, column.label,
    el("span", { class: "arrow", "aria-hidden": "true" }));
  const first = Boolean(column.worst); // the worst first
  button.addEventListener("click", () =>
    sortBy(column.key, state.sort === column.key ? !state.desc : first));
  const text = column.type ?? "number";
  if (!column.hidden)
    at("head").append(el("th", { scope: "col", "data-key": column.key, class: text }, button));
  for (const desc of [first, !first])
    at("sort").append(el("option", { value: `${column.key} ${desc ? "desc" : "asc"}` },
      `${column.label} ${desc ? "↓" : "↑"}`));
}
at("head").children[PICTURES].before(
  ...pictures.map((name) => el("th", { scope: "col", class: "text" }, name)));
at("sort").addEventListener("change", (event) => {
  const [key, order] = event.target.value.split(" ");
  sortBy(key, order === "desc");
});
at("filter").addEventListener("input", (event) => {
  state.filter = event.target.value;
  drawTable();
});
at("operand").addEventListener("change", (event) => {
  state.operand = event.target.value;
  drawTable();
});
at("problems").addEventListener("change", (event) => {
  state.problems = event.target.checked;
  drawTable();
});
at("more").addEventListener("click", drawMore);
new IntersectionObserver((entries) => {
  if (entries.some((entry) => entry.isIntersecting) && drawn < shown.length) drawMore();
}, { rootMargin: "400px" }).observe(at("more"));
function go(step) {
  state.step = Math.min(Math.max(step, 0), run.snapshots.length - 1);
  draw();
}
at("step").addEventListener("input", (event) => go(Number(event.target.value)));
at("earlier").addEventListener("click", () => go(state.step - 1));
at("later").addEventListener("click", () => go(state.step + 1));
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) draw(); // a phone's address bar changes the height alone
  width = innerWidth;
});

// `#sort=amax&desc=1&filter=attn&operand=weight&problems=1&step=2&open=0`: a view to send someone.
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (COLUMNS.some((column) => column.key === asked.get("sort"))) state.sort = asked.get("sort");
  if (asked.has("desc")) state.desc = asked.get("desc") === "1";
  if (asked.has("problems")) state.problems = asked.get("problems") === "1";
  state.filter = asked.get("filter") ?? state.filter;
  state.operand = asked.get("operand") ?? state.operand;
  const open = Number(asked.get("open") ?? "x");
  if (casts[open]) opened.add(open);
  const last = run.snapshots.length - 1;
  go(/^\d+$/.test(asked.get("step") ?? "") ? Number(asked.get("step")) : last);
}
addEventListener("hashchange", follow);

const { about } = run;
at("about").textContent =
  `${about.file} · float8 ${about.float8} · torch ${about.torch} · ` +
  (many ? `${run.snapshots.length} snapshots` : nameOf(0).replace("snapshot 1", "one snapshot"));
at("step").max = run.snapshots.length - 1;
at("app").hidden = false;
at("run-card").hidden = !many;
follow();
