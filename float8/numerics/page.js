"use strict";
// The run is data: every text of it becomes a text node or an attribute, never markup.
const run = JSON.parse(document.getElementById("run").textContent);
const at = (id) => document.getElementById(id);
const CHUNK = 60;
const SVG = "http://www.w3.org/2000/svg";
const USUAL = { input: "output", weight: "output", grad_output: "grad_input" };
const LOOKS = ["fine", "look", "bad"];

// --- elements and numbers

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// A long name may end a line behind a dot or an underscore.
const breakable = (text) =>
  text.split(/(?<=[._])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));

function number(value) {
  if (value === null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(3)));
}
function percent(value) {
  if (value === null) return "–";
  if (value > 0 && value < 1e-4) return "<0.01 %";
  return `${Number((100 * value).toPrecision(value < 0.1 ? 2 : 3))} %`;
}
function decibel(value) {
  if (value === null) return "–";
  return value === Infinity ? "exact" : value === -Infinity ? "none" : value.toFixed(1);
}
const withUnit = (value) => decibel(value) + (Number.isFinite(value ?? NaN) ? " dB" : "");
const octaves = (value) => (value === null ? "–" : `${value > 0 ? "+" : ""}${value.toFixed(1)}`);
const power = (exponent) =>
  Number.isFinite(exponent)
    ? ["2", el("sup", {}, exponent.toFixed(1).replace("-", "−"))]
    : [number(2 ** exponent)];
const plural = (count, noun) => `${counted(count)} ${noun}${count === 1 ? "" : "s"}`;
const counted = (value) => value.toLocaleString("en");
const scales = (row) =>
  row.scale_min === row.scale_max
    ? number(row.scale_min)
    : `${number(row.scale_min)} … ${number(row.scale_max)}`;

// --- the run

const NAMES = ["layer", "operand", "gemm", "format", "scaling", "granularity"];
const casts = run.casts.map((cast) => Object.fromEntries(NAMES.map((name, i) => [name, cast[i]])));
const TEXTS = new Set(["shares"]);
const rowOf = (values) => {
  const row = {};
  run.columns.forEach((name, i) => {
    row[name] = typeof values[i] === "string" && !TEXTS.has(name) ? Number(values[i]) : values[i];
  });
  return Object.assign(row, casts[row.cast]);
};
const parsed = new Map();
function rowsOf(step) {
  if (!parsed.has(step)) parsed.set(step, run.snapshots[step].rows.map(rowOf));
  return parsed.get(step);
}
const many = run.snapshots.length > 1;
const SQNR = run.columns.indexOf("sqnr");
const trends = many ? casts.map(() => run.snapshots.map(() => null)) : [];
if (many)
  run.snapshots.forEach((snapshot, step) => {
    for (const row of snapshot.rows)
      trends[row[0]][step] = row[SQNR] === null ? null : Number(row[SQNR]);
  });
const nameOf = (step) =>
  run.snapshots[step].step === null ? `snapshot ${step + 1}` : `step ${run.snapshots[step].step}`;
const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));
function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  if (!sorted.length) return null;
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// --- histograms in powers of two, over the format's range

function rangeOf(row) {
  const format = run.formats[row.format];
  const log = (value, scale) => Math.log2(value * scale);
  return {
    flushed: log(format.flushed, row.scale_min),
    flushedSome: log(format.flushed, row.scale_max),
    normal: log(format.normal, row.scale_max),
    saturatedSome: log(format.max, row.scale_min),
    saturated: log(format.max, row.scale_max),
  };
}
function histogram(row, width, height, large) {
  const top = large ? 6 : 1, bottom = large ? height - 34 : height - 1;
  const left = large ? 46 : 0, right = width - (large ? 6 : 0);
  const known = row.scale_min > 0 && Number.isFinite(row.scale_max);
  const range = known ? rangeOf(row) : null;
  const ends = row.shares ? [row.lowest, row.lowest + row.shares.length] : [];
  if (known) ends.push(Math.floor(range.flushed) - 1, Math.ceil(range.saturated) + 2);
  const first = Math.min(...ends), last = Math.max(...ends);
  const x = (exponent) => left + ((exponent - first) / (last - first)) * (right - left);
  const label = `${row.layer} ${row.operand}: histogram in powers of two`;
  const picture = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
  });
  if (!ends.length) return picture;
  const zone = (from, to, name) => {
    if (to > from)
      picture.append(svg("rect", {
        x: x(from), y: top, width: x(to) - x(from), height: bottom - top, class: `zone-${name}`,
      }));
  };
  if (known) {
    zone(first, range.flushed, "flushed");
    zone(range.flushed, range.flushedSome, "flushed-some");
    zone(range.flushedSome, range.normal, "subnormal");
    zone(range.normal, range.saturatedSome, "normal");
    zone(Math.max(range.saturatedSome, range.normal), range.saturated, "saturated-some");
    zone(range.saturated, last, "saturated");
  }
  if (large) axes(picture, first, last, x, top, bottom, left, right);
  const gap = Math.min(2, (x(1) - x(0)) / 6);
  [...row.shares].forEach((character, i) => {
    const level = run.levels.indexOf(character) / (run.levels.length - 1);
    if (!level) return;
    const exponent = row.lowest + i, middle = exponent + 0.5;
    const kind = !known ? "" : middle < range.flushed ? "-flushed"
      : middle > range.saturated ? "-saturated" : middle < range.normal ? "-subnormal" : "";
    const size = Math.max(1, level * (bottom - top));
    const share = Math.pow(10, run.decades * (level - 1));
    picture.append(svg("rect", {
      x: x(exponent) + gap / 2, y: bottom - size, width: x(1) - x(0) - gap, height: size,
      class: `bar bar${kind}`,
    }, large ? svg("title", {}, `2^${exponent}: about ${percent(share)}`) : null));
  });
  return picture;
}
function axes(picture, first, last, x, top, bottom, left, right) {
  for (const [power, text] of [[0, "100 %"], [-2, "1 %"], [-4, "0.01 %"], [-6, "1 ppm"]]) {
    const y = bottom - (1 + power / run.decades) * (bottom - top);
    picture.append(
      svg("line", { x1: left, x2: right, y1: y, y2: y, class: "grid" }),
      svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text),
    );
  }
  picture.append(svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
  const unit = x(1) - x(0);
  const every = [1, 2, 4, 8, 16, 32, 64].find((n) => n * unit >= 34) ?? 128;
  for (let e = Math.ceil(first / every) * every; e <= last; e += every) {
    const raised = svg("tspan", { dy: "-4", "font-size": "9" }, String(e).replace("-", "−"));
    picture.append(svg("text", { x: x(e), y: bottom + 15, "text-anchor": "middle" }, "2", raised));
  }
  picture.append(
    svg("text", { x: (left + right) / 2, y: bottom + 30, "text-anchor": "middle" }, "magnitude"),
  );
}

// --- lines over the steps

function lines(series, width, height, large) {
  const all = finite(series.flatMap((one) => one.values));
  const picture = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `SQNR over the snapshots: ${series.map((one) => one.name).join(", ")}`,
  });
  if (!all.length) return picture;
  const low = Math.min(...all), high = Math.max(...all);
  const pad = large ? Math.max(1, (high - low) * 0.12) : Math.max(0.5, (high - low) * 0.1);
  const left = large ? 46 : 3, right = width - (large ? 64 : 3);
  const top = large ? 8 : 3, bottom = height - (large ? 22 : 3);
  const count = run.snapshots.length;
  const x = (i) => left + (i / Math.max(1, count - 1)) * (right - left);
  const y = (v) => bottom - ((v - low + pad) / (high - low + 2 * pad)) * (bottom - top);
  if (large) {
    for (const value of high - low < 0.05 ? [high] : [low, high])
      picture.append(
        svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }),
        svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" },
          `${value.toFixed(value < 10 ? 1 : 0)} dB`),
      );
    const ends = count > 1 ? [[0, "start"], [count - 1, "end"]] : [[0, "start"]];
    for (const [i, anchor] of ends)
      picture.append(svg("text", { x: x(i), y: height - 4, "text-anchor": anchor }, nameOf(i)));
    picture.append(svg("line", {
      x1: x(state.step), x2: x(state.step), y1: top, y2: bottom, class: "now",
    }));
  }
  for (const one of series) {
    let path = "", drawing = false;
    one.values.forEach((value, i) => {
      const there = value !== null && Number.isFinite(value);
      if (there) path += `${drawing ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
      drawing = there;
    });
    picture.append(svg("path", { d: path, class: `line line-${one.name}` }));
    const now = one.values[state.step];
    if (now !== null && Number.isFinite(now))
      picture.append(svg("circle", {
        cx: x(state.step), cy: y(now), r: large ? 4 : 2.5, class: `dot dot-${one.name}`,
      }));
  }
  if (large) nameLines(picture, series, right, y);
  return picture;
}
function nameLines(picture, series, right, y) {
  let free = Infinity; // upwards from the lowest line, so that names do not overlap
  const last = (one) => finite(one.values).at(-1);
  const known = series.filter((one) => last(one) !== undefined).sort((a, b) => last(a) - last(b));
  for (const one of known) {
    free = Math.min(y(last(one)) + 4, free - 13);
    picture.append(svg("text", {
      x: right + 8, y: free, class: `label label-${one.name}`,
    }, one.name));
  }
}

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
      const p = a[state.sort], q = b[state.sort];
      if (missing(p) || missing(q)) return missing(p) - missing(q); // what is not known comes last
      const order = typeof p === "string" ? p.localeCompare(q, "en", { numeric: true }) : p - q;
      return sign * (order || 0);
    });
}
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
  const level = column.key === "sqnr" ? row.level : 0;
  const several = column.key === "scale_max" && row.scale_min !== row.scale_max;
  return el("td", { "data-label": column.label, class: `level-${level} ${column.key}` },
    el("span", { class: "value" }, column.show(row)),
    level ? el("span", { class: `badge level-${level}` }, LOOKS[level]) : null,
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
    ["stale by", `${octaves(row.staleness)} octaves`],
  ];
  const list = el("dl");
  for (const [name, ...values] of facts)
    list.append(el("dt", {}, name), el("dd", {}, ...values));
  const figure = el("figure", {}, histogram(row, width, 210, true),
    el("figcaption", {}, "Share of the elements by magnitude, before the cast (logarithmic)"));
  if (many)
    figure.append(lines([{ name: "SQNR", values: trends[row.cast] }], width, 110, true));
  cell.append(el("div", { class: "panes" }, figure, list));
  run.rules.forEach((rule, i) => {
    if (row.broken & (1 << i))
      cell.append(el("p", { class: "advice" }, el("b", {}, `It ${rule.one}. `),
        rule.advice));
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
function drawHealth() {
  const snapshot = run.snapshots[state.step];
  const level = Math.max(0, ...snapshot.findings.map((finding) => finding.level));
  const titles = ["Healthy", "Worth a look", "Something is wrong"];
  at("health").className = `card level-${level}`;
  at("health").replaceChildren(el("h2", {}, snapshot.rows.length ? titles[level] : "Nothing seen"),
    el("p", {}, snapshot.verdict));
  const list = el("div", { class: "findings" });
  for (const finding of snapshot.findings) {
    const show = el("button", { type: "button", class: "link" }, "Show the worst");
    show.addEventListener("click", () => reveal(finding.cast));
    list.append(el("div", { class: "finding" },
      el("h3", {}, el("span", { class: `badge level-${finding.level}` }, LOOKS[finding.level]),
        finding.title),
      el("p", {}, `${finding.text} `, show),
      el("p", { class: "muted" }, run.rules[finding.rule].advice)));
  }
  if (snapshot.findings.length) at("health").append(list);
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
