"use strict";
// The run, and pictures of it; page.js, which follows in the same script, shows them.
// The run is data: every text of it becomes a text node or an attribute, never markup.
const run = JSON.parse(document.getElementById("run").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const FIRST_GEMM = { input: "output", weight: "output", grad_output: "grad_input" };
const LEVEL_NAMES = ["fine", "look", "bad"];

// --- elements and numbers

function setContent(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}
const element = (tag, attributes = {}, ...children) =>
  setContent(document.createElement(tag), attributes, children);
const svgElement = (tag, attributes = {}, ...children) =>
  setContent(document.createElementNS(SVG, tag), attributes, children);

// A long name may end a line behind a dot or an underscore.
const breakable = (text) =>
  text.split(/(?<=[._])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));

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
const decibelWithUnit = (value) => decibel(value) + (Number.isFinite(value ?? NaN) ? " dB" : "");
function octaves(value) {
  if (value === null) return "–";
  const text = value.toFixed(1);
  return Number(text) === 0 ? "0.0" : value > 0 ? `+${text}` : text;
}
const powerOfTwo = (exponent) =>
  Number.isFinite(exponent)
    ? ["2", element("sup", {}, exponent.toFixed(1).replace("-", "−"))]
    : [number(2 ** exponent)];
const plural = (count, noun) => `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
const grouped = (value) => value.toLocaleString("en");
const scaleText = (row) =>
  row.scale_min === row.scale_max
    ? number(row.scale_min)
    : `${number(row.scale_min)} … ${number(row.scale_max)}`;

// --- the run

const casts = run.casts.map((cast) =>
  Object.fromEntries(run.labels.map((name, i) => [name, cast[i]])));
const rowOf = (values) => {
  const row = {};
  run.columns.forEach((name, i) => {
    const isNumber = typeof values[i] === "string" && name !== "shares"; // as "Infinity"
    row[name] = isNumber ? Number(values[i]) : values[i];
  });
  return Object.assign(row, casts[row.cast]);
};
const parsed = new Map();
function rowsOf(step) {
  if (!parsed.has(step)) parsed.set(step, run.snapshots[step].rows.map(rowOf));
  return parsed.get(step);
}
const hasSteps = run.snapshots.length > 1;
const SQNR = run.columns.indexOf("sqnr");
const trends = hasSteps ? casts.map(() => run.snapshots.map(() => null)) : [];
if (hasSteps)
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
  const left = large ? 46 : 0, right = width - (large ? 14 : 0);
  const known = row.scale_min > 0 && Number.isFinite(row.scale_max);
  const range = known ? rangeOf(row) : null;
  const ends = row.shares ? [row.lowest, row.lowest + row.shares.length] : [];
  if (known) ends.push(Math.floor(range.flushed) - 1, Math.ceil(range.saturated) + 2);
  const first = Math.min(...ends), last = Math.max(...ends);
  const x = (exponent) => left + ((exponent - first) / (last - first)) * (right - left);
  const label = `${row.layer} ${row.operand}: histogram in powers of two`;
  const picture = svgElement("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
  });
  if (!ends.length) return picture;
  const zone = (from, to, name) => {
    if (to > from)
      picture.append(svgElement("rect", {
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
  if (large) drawAxes(picture, first, last, x, top, bottom, left, right);
  // An amax that ends at the range saturates nothing, however wide its bar.
  const cuts = known ? { ...range, saturated: row.saturated ? range.saturated : Infinity } : null;
  const gap = Math.min(2, (x(1) - x(0)) / 6);
  [...row.shares].forEach((character, i) => {
    const level = run.levels.indexOf(character) / (run.levels.length - 1);
    if (!level) return;
    const exponent = row.lowest + i;
    const share = Math.pow(10, run.decades * (level - 1));
    const bar = svgElement("g", {},
      large ? svgElement("title", {}, `2^${exponent}: about ${percent(share)}`) : null);
    const size = Math.max(1, level * (bottom - top));
    const isLast = i === row.shares.length - 1; // which ends at the largest value
    const end = isLast ? Math.max(Math.log2(row.amax), exponent + 0.2) : exponent + 1;
    for (const [kind, from, to] of barParts(cuts, exponent, Math.min(end, exponent + 1)))
      bar.append(svgElement("rect", {
        x: x(from) + (from === exponent ? gap / 2 : 0), y: bottom - size, height: size,
        width: Math.max(0.5, x(to) - x(from) - gap / 2), class: `bar bar${kind}`,
      }));
    picture.append(bar);
  });
  return picture;
}
// A bar, cut where the format's zones end.
function barParts(range, from, to) {
  if (!range) return [["", from, to]];
  const zones = [
    ["-flushed", -Infinity, range.flushed], ["-subnormal", range.flushed, range.normal],
    ["", range.normal, range.saturated], ["-saturated", range.saturated, Infinity],
  ];
  return zones
    .map(([kind, low, high]) => [kind, Math.max(low, from), Math.min(high, to)])
    .filter(([, low, high]) => high - low > 0.01);
}
function drawAxes(picture, first, last, x, top, bottom, left, right) {
  for (const [power, text] of [[0, "100 %"], [-2, "1 %"], [-4, "0.01 %"], [-6, "1 ppm"]]) {
    const y = bottom - (1 + power / run.decades) * (bottom - top);
    picture.append(
      svgElement("line", { x1: left, x2: right, y1: y, y2: y, class: "grid" }),
      svgElement("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, text),
    );
  }
  picture.append(
    svgElement("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
  const unit = x(1) - x(0);
  const every = [1, 2, 4, 8, 16, 32, 64].find((n) => n * unit >= 34) ?? 128;
  for (let e = Math.ceil(first / every) * every; e <= last; e += every) {
    const raised = svgElement("tspan", { dy: "-4", "font-size": "9" }, String(e).replace("-", "−"));
    picture.append(
      svgElement("text", { x: x(e), y: bottom + 15, "text-anchor": "middle" }, "2", raised));
  }
  picture.append(
    svgElement("text",
      { x: (left + right) / 2, y: bottom + 30, "text-anchor": "middle" }, "magnitude"));
}

// --- lines over the steps

function lineChart(series, width, height, large) {
  const all = finite(series.flatMap((one) => one.values));
  const picture = svgElement("svg", {
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
    for (const value of y(low) - y(high) < 12 ? [high] : [low, high]) // not one over the other
      picture.append(
        svgElement("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: "grid" }),
        svgElement("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" },
          `${value.toFixed(value < 10 ? 1 : 0)} dB`),
      );
    const ends = count > 1 ? [[0, "start"], [count - 1, "end"]] : [[0, "start"]];
    for (const [i, anchor] of ends)
      picture.append(
        svgElement("text", { x: x(i), y: height - 4, "text-anchor": anchor }, nameOf(i)));
    picture.append(svgElement("line", {
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
    picture.append(svgElement("path", { d: path, class: `line line-${one.name}` }));
    const now = one.values[state.step];
    if (now !== null && Number.isFinite(now))
      picture.append(svgElement("circle", {
        cx: x(state.step), cy: y(now), r: large ? 4 : 2.5, class: `dot dot-${one.name}`,
      }));
  }
  if (large) labelLines(picture, series, right, y);
  return picture;
}
function labelLines(picture, series, right, y) {
  let free = Infinity; // upwards from the lowest line, so that names do not overlap
  const last = (one) => finite(one.values).at(-1);
  const known = series.filter((one) => last(one) !== undefined).sort((a, b) => last(a) - last(b));
  for (const one of known) {
    free = Math.min(y(last(one)) + 4, free - 13);
    picture.append(svgElement("text", {
      x: right + 8, y: free, class: `label label-${one.name}`,
    }, one.name));
  }
}
