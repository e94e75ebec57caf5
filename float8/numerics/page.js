// The page: health, key figures, the table, and the events of the user. Before it come pictures.js
// and explanations.js, after it keyboard.js and print.js.
const ROWS_AT_ONCE = 60; // rows that are drawn at once

// --- what is shown

const COLUMNS = [
  { key: "layer", type: "text" },
  { key: "operand", type: "text" },
  { key: "format", type: "text", hidden: true }, // in the operand's cell
  { key: "sqnr", show: (row) => decibel(row.sqnr) },
  { key: "flushed", show: (row) => percent(row.flushed), worst: true },
  { key: "saturated", show: (row) => percent(row.saturated), worst: true },
  { key: "amax", show: (row) => number(row.amax), worst: true },
  { key: "scale_max", show: (row) => number(row.scale_max), worst: true },
  { key: "kurtosis", show: (row) => number(row.kurtosis), worst: true },
  { key: "staleness", show: (row) => octaves(row.staleness), worst: true },
];
// The column of each kind of problem.
const KIND_COLUMNS = ["sqnr", "saturated", "flushed", "sqnr", "staleness", "sqnr"];
const PICTURE_PLACE = 3; // the pictures are before this column
const pictureKeys = hasSteps ? ["histogram", "trend"] : ["histogram"];
const state = { step: 0, sort: "sqnr", desc: false, filter: "", operand: "", problems: false };
const openCasts = new Set();
let shown = [], drawn = 0, printing = false;

function sortedRows() {
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
  const open = element("button", { type: "button", "aria-expanded": "false" },
    element("span", { class: "chevron", "aria-hidden": "true" }, "▸"),
    element("span", {}, ...breakable(row.layer || "(the model itself)")));
  const second = row.gemm === FIRST_GEMM[row.operand] ? [] : [`for ${row.gemm}`];
  const cast = [row.format.toUpperCase(), row.scaling, row.granularity, ...second].join(" ");
  const tr = element("tr", { class: "cast", "data-cast": row.cast },
    element("td", { class: "layer" }, open),
    element("td", { class: "text operand" }, row.operand, element("span", { class: "tag" }, cast)));
  for (const column of COLUMNS.slice(3)) tr.append(cellOf(row, column));
  const small = phone() ? roomOfTable() - 26 : 0;
  const drawings = [histogram(row, small || 132, 30, false)];
  const trend = [{ name: "cast", values: trends[row.cast] }];
  if (hasSteps) drawings.push(lineChart(trend, small || 84, 28, false));
  const cells = drawings.map((drawing) => element("td", { class: "wide" }, drawing));
  tr.children[PICTURE_PLACE].before(...cells);
  open.addEventListener("click", () => toggleDetails(tr, row));
  tr.addEventListener("click", (event) => { // anywhere else, unless the user selects text
    if (!event.target.closest("button") && getSelection().isCollapsed) toggleDetails(tr, row);
  });
  return tr;
}
const badge = (level) =>
  element("span", { class: `badge level-${level}` }, LEVEL_NAMES[level]);
function cellOf(row, column) {
  const first = column.key === "sqnr"; // where the badge stands
  const isNoisy = first && row.sqnr !== null && row.sqnr < run.formats[row.format].noisy;
  const hasKind = (key, i) => key === column.key && row.problems & (1 << i);
  const level = isNoisy || KIND_COLUMNS.some(hasKind) ? row.level : 0;
  const several = column.key === "scale_max" && row.scale_min !== row.scale_max;
  const tag = (text) => element("span", { class: "tag" }, text);
  const label = nameOfColumn(column.key);
  return element("td", { "data-label": label, class: `level-${level} ${column.key}` },
    explained(column.key, { class: "cell-label", tabindex: "-1" }), // of a card on a phone
    element("span", { class: "value" }, column.show(row)),
    first && row.level ? badge(row.level) : null,
    first && row.nonfinite ? tag(`${grouped(row.nonfinite)} inf or NaN`) : null,
    several ? tag(`from ${number(row.scale_min)}`) : null);
}
const phone = () => !printing && matchMedia("(max-width: 760px)").matches;
const roomOfTable = () => (printing ? PRINTED_WIDTH : byId("scroll").clientWidth);
function toggleDetails(tr, row) {
  if (!openCasts.delete(row.cast)) return openDetails(tr, row);
  tr.nextElementSibling.remove();
  tr.querySelector("button").setAttribute("aria-expanded", "false");
}
function openDetails(tr, row) {
  openCasts.add(row.cast);
  tr.querySelector("button").setAttribute("aria-expanded", "true");
  const cell = element("div");
  const room = roomOfTable() - (phone() ? 26 : 30);
  cell.style.width = `${room}px`; // not the table's, which may be wider than its place
  tr.after(element("tr", { class: "detail" },
    element("td", { colspan: byId("head").children.length }, cell)));
  const width = Math.min(phone() ? room : (room - 18) * 0.6, 720);
  const range = rangeOf(row);
  const facts = [
    ["elements", `${grouped(row.elements)} in ${plural(row.calls, "call")}`],
    ["zeros", grouped(row.zeros)],
    ["nonfinite", grouped(row.nonfinite)],
    ["amax", number(row.amax)],
    ["scale_max", scaleText(row)],
    ["precise between", ...powerOfTwo(range.normal), " and ", ...powerOfTwo(range.saturated)],
    ["zero below", ...powerOfTwo(range.flushed)],
    ["sqnr", `${decibel(row.sqnr)} of ${run.formats[row.format].expected}`],
    ["kurtosis", number(row.kurtosis)],
  ];
  if (row.gradient_sqnr !== null)
    facts.push(["gradient_sqnr", decibelWithUnit(row.gradient_sqnr)]);
  if (row.staleness !== null) facts.push(["staleness", `${octaves(row.staleness)} octaves`]);
  const list = element("dl");
  for (const [name, ...values] of facts)
    list.append(element("dt", {}, hasExplanation(name) ? explained(name) : name),
      element("dd", {}, ...values));
  const figure = element("figure", {}, histogram(row, width, printing ? 140 : 210, true),
    element("figcaption", {}, "Share of the elements by magnitude, before the cast (logarithmic)"));
  const trend = hasSteps ? trends[row.cast] : [];
  if (finite(trend).length)
    figure.append(lineChart([{ name: "SQNR", values: trend }], width, printing ? 80 : 110, true));
  cell.append(element("div", { class: "panes" }, figure, list));
  run.kinds.forEach((kind, i) => {
    if (row.problems & (1 << i))
      cell.append(element("p", { class: "advice" }, element("b", {}, `It ${kind.one}. `),
        kind.advice));
  });
}
function drawMore() {
  const end = printing ? shown.length : Math.min(drawn + ROWS_AT_ONCE, shown.length);
  for (const row of shown.slice(drawn, end)) {
    const tr = castRow(row);
    byId("body").append(tr);
    if (openCasts.has(row.cast)) openDetails(tr, row);
  }
  drawn = end;
  byId("more").hidden = drawn === shown.length;
  byId("more").textContent = `Show more (${grouped(shown.length - drawn)} left)`;
}
function drawTable() {
  const rows = sortedRows();
  shown = printing ? rowsToPrint(rows) : rows;
  drawn = 0;
  byId("body").replaceChildren();
  drawMore();
  const all = rowsOf(state.step).length;
  byId("count").textContent = `${grouped(rows.length)} of ${grouped(all)} casts`;
  byId("caption").textContent = captionOf(rows.length - shown.length);
  for (const th of byId("head").children) {
    const mine = th.dataset.key === state.sort;
    if (mine) th.setAttribute("aria-sort", state.desc ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
    const arrow = th.querySelector(".arrow");
    if (arrow) arrow.textContent = mine ? (state.desc ? "▾" : "▴") : "";
  }
  byId("sort").value = `${state.sort} ${state.desc ? "desc" : "asc"}`;
}
// For readers of a screen or of paper, who do not see the filters.
function captionOf(left) {
  const order = `${nameOfColumn(state.sort)}, ${state.desc ? "descending" : "ascending"}`;
  const parts = [`${byId("count").textContent} at ${nameOf(state.step)}, by ${order}`];
  if (state.filter) parts.push(`layers with "${state.filter}"`);
  if (state.operand) parts.push(`operand ${state.operand}`);
  if (state.problems) parts.push("only what wants a look");
  if (left) parts.push(`without ${plural(left, "cast")} that want no look`);
  return parts.join("; ");
}
const levelOf = (step) =>
  Math.max(0, ...run.snapshots[step].problems.map((problem) => problem.level));
function drawHealth() {
  const snapshot = run.snapshots[state.step];
  const level = levelOf(state.step);
  const titles = ["Healthy", "Worth a look", "Something is wrong"];
  const title = snapshot.rows.length ? titles[level] : "Nothing seen";
  byId("health").className = `card level-${level}`;
  const heading = hasSteps ? `${title} at ${nameOf(state.step)}` : title;
  byId("health").replaceChildren(element("h2", {}, heading), element("p", {}, snapshot.summary));
  const list = element("div", { class: "problems" });
  for (const problem of snapshot.problems) {
    const show = element("button", { type: "button", class: "link" }, "Show it");
    show.addEventListener("click", () => showCast(problem.cast));
    list.append(element("div", { class: "problem" },
      element("h3", {}, badge(problem.level), problem.title),
      element("p", {}, `${problem.text} `, show),
      element("p", { class: "muted" }, run.kinds[problem.kind].advice)));
  }
  if (snapshot.problems.length) byId("health").append(list);
  if (snapshot.skipped.length)
    byId("health").append(element("details", { class: "problem" },
      element("summary", {}, `${plural(snapshot.skipped.length, "layer")} not seen, or not wholly`),
      ...snapshot.skipped.map(([layer, reason]) =>
        element("p", {}, element("b", {}, layer), `: ${reason}`))));
}
function showCast(cast) {
  const { layer, operand } = casts[cast];
  Object.assign(state, { filter: layer, operand, problems: false });
  openCasts.add(cast);
  draw();
  byId("scroll").scrollIntoView({ block: "start" });
  document.querySelector(`tr[data-cast="${cast}"] button`)?.focus({ preventScroll: true });
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
  const middle = median(finite(rows.map((row) => row.sqnr)));
  const tiles = [ // the key of their explanation, or none, and their name
    ["sqnr", "worst SQNR", lowest ? decibelWithUnit(lowest.sqnr) : "–", place(lowest)],
    ["sqnr", "median SQNR", decibelWithUnit(middle), "of all casts"],
    ["saturated", "most saturated", ...most("saturated")],
    ["flushed", "most flushed", ...most("flushed")],
    ["nonfinite", "inf or NaN", grouped(bad.reduce((sum, row) => sum + row.nonfinite, 0)),
      bad.length ? place(bad[0]) : "elements"],
    ["", "layers", grouped(layers), plural(rows.length, "cast")],
  ];
  byId("tiles").replaceChildren(...tiles.map(([key, name, value, where]) =>
    element("div", { class: "tile" },
      element("span", { class: "small muted" }, key ? explained(key, {}, name) : name),
      element("b", {}, value),
      element("span", { class: "small muted" }, ...breakable(where)))));
}
// Consecutive snapshots of the same level, as [first, last, level].
function problemSpans() {
  const found = [];
  run.snapshots.forEach((_, step) => {
    const level = levelOf(step), before = found.at(-1);
    if (!level) return;
    if (before && before[1] === step - 1 && before[2] === level) before[1] = step;
    else found.push([step, step, level]);
  });
  return found;
}
function drawProblemSpans() {
  const found = problemSpans(), parts = ["Wants a look:"];
  for (const [first, last, level] of found.slice(0, 12)) {
    const name = first === last ? nameOf(first) : `${nameOf(first)} to ${nameOf(last)}`;
    const link = element("button", { type: "button", class: "link" }, name);
    link.addEventListener("click", () => goToStep(first));
    parts.push(" ", element("span", { class: "problem-step" }, link, " ", badge(level)));
  }
  if (found.length > 12) parts.push(` and ${found.length - 12} more`);
  byId("problem-steps").replaceChildren(...parts);
  byId("problem-steps").hidden = !found.length;
}
// When an alarm was, in the steps of its looks.
function timeOfAlarm(alarm) {
  const wrong = alarm.first === alarm.last ? `wrong at step ${alarm.first}`
    : `wrong from step ${alarm.first} to step ${alarm.last}`;
  return alarm.ended === null ? `${wrong}, not ended` : `${wrong}, ended at step ${alarm.ended}`;
}
function drawAlarms() {
  byId("alarms").hidden = !run.alarms.length;
  byId("alarms").className = `card level-${run.active_alarms ? 2 : 0}`;
  const list = element("div", { class: "problems" });
  for (const alarm of run.alarms) {
    const show = element("button", { type: "button", class: "link" }, "Show it");
    show.addEventListener("click", () => {
      state.step = alarm.snapshot;
      showCast(alarm.cast);
    });
    const isOver = alarm.ended !== null;
    list.append(element("div", { class: "problem" },
      element("h3", {}, element("span", { class: `badge level-${isOver ? 0 : 2}` },
        isOver ? "ended" : "active"),
      `${alarm.rule}: ${alarm.layer || "(the model itself)"}, ${alarm.operand}`),
      element("p", {}, `${alarm.message} (step ${alarm.started}; ${timeOfAlarm(alarm)}) `,
        alarm.snapshot === null ? null : show),
      element("p", { class: "muted" }, alarm.advice)));
  }
  const left = run.alarm_count - run.alarms.length;
  if (left) list.append(element("p", { class: "problem" }, `and ${left} more`));
  const title = `${plural(run.alarm_count, "alarm")}, ${run.active_alarms} active`;
  byId("alarms").replaceChildren(element("h2", {}, title), list);
}
function drawRun() {
  if (!hasSteps) return;
  const values = run.snapshots.map((_, step) => finite(trends.map((trend) => trend[step])));
  const least = (some) => some.reduce((a, b) => Math.min(a, b), Infinity);
  const series = [
    { name: "worst", values: values.map((some) => (some.length ? least(some) : null)) },
    { name: "median", values: values.map(median) },
  ];
  byId("run-chart").replaceChildren(element("h2", {}, "SQNR over the run"),
    lineChart(series, printing ? PRINTED_WIDTH : byId("run-chart").clientWidth || 320, 150, true));
  byId("step").value = state.step;
  byId("step-name").textContent = nameOf(state.step);
  const focused = document.activeElement;
  byId("earlier").disabled = state.step === 0;
  byId("later").disabled = state.step === run.snapshots.length - 1;
  if (focused.disabled) byId("step").focus(); // a disabled button would lose it
}
function draw() {
  for (const id of ["filter", "operand"]) byId(id).value = state[id];
  byId("problems").checked = state.problems;
  drawRun();
  drawHealth();
  drawTiles();
  drawTable();
}

// --- events

function sortBy(key, desc) {
  Object.assign(state, { sort: key, desc });
  drawTable();
}
for (const column of COLUMNS) {
  const name = nameOfColumn(column.key);
  const button = explained(column.key, { class: "sort" }, name);
  button.append(element("span", { class: "arrow", "aria-hidden": "true" }));
  const first = Boolean(column.worst); // the worst first
  button.addEventListener("click", () =>
    sortBy(column.key, state.sort === column.key ? !state.desc : first));
  const text = column.type ?? "number";
  if (!column.hidden)
    byId("head").append(
      element("th", { scope: "col", "data-key": column.key, class: text }, button));
  for (const desc of [first, !first])
    byId("sort").append(element("option", { value: `${column.key} ${desc ? "desc" : "asc"}` },
      `${name} ${desc ? "↓" : "↑"}`));
}
byId("head").children[PICTURE_PLACE].before(
  ...pictureKeys.map((key) => element("th", { scope: "col", class: "text" }, explained(key))));
byId("sort").addEventListener("change", (event) => {
  const [key, order] = event.target.value.split(" ");
  sortBy(key, order === "desc");
});
byId("filter").addEventListener("input", (event) => {
  state.filter = event.target.value;
  drawTable();
});
byId("operand").addEventListener("change", (event) => {
  state.operand = event.target.value;
  drawTable();
});
byId("problems").addEventListener("change", (event) => {
  state.problems = event.target.checked;
  drawTable();
});
byId("more").addEventListener("click", () => {
  const first = drawn;
  drawMore();
  document.querySelectorAll("td.layer button")[first]?.focus({ preventScroll: true });
});
new IntersectionObserver((entries) => {
  if (entries.some((entry) => entry.isIntersecting) && drawn < shown.length) drawMore();
}, { rootMargin: "400px" }).observe(byId("more"));
function goToStep(step) {
  state.step = Math.min(Math.max(step, 0), run.snapshots.length - 1);
  draw();
}
byId("step").addEventListener("input", (event) => goToStep(Number(event.target.value)));
byId("earlier").addEventListener("click", () => goToStep(state.step - 1));
byId("later").addEventListener("click", () => goToStep(state.step + 1));
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) draw(); // a phone's address bar changes the height alone
  width = innerWidth;
});

// `#sort=amax&desc=1&filter=attn&operand=weight&problems=1&step=2&open=0`: a view to send someone.
function showAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (COLUMNS.some((column) => column.key === asked.get("sort"))) state.sort = asked.get("sort");
  if (asked.has("desc")) state.desc = asked.get("desc") === "1";
  if (asked.has("problems")) state.problems = asked.get("problems") === "1";
  state.filter = asked.get("filter") ?? state.filter;
  state.operand = asked.get("operand") ?? state.operand;
  const open = Number(asked.get("open") ?? "x");
  if (casts[open]) openCasts.add(open);
  const last = run.snapshots.length - 1;
  goToStep(/^\d+$/.test(asked.get("step") ?? "") ? Number(asked.get("step")) : last);
}
addEventListener("hashchange", showAddress);

const { about } = run;
byId("about").textContent =
  `${about.file} · float8 ${about.float8} · torch ${about.torch} · ` +
  (hasSteps
    ? `${run.snapshots.length} snapshots`
    : nameOf(0).replace("snapshot 1", "one snapshot"));
byId("step").max = run.snapshots.length - 1;
byId("app").hidden = false;
byId("run-card").hidden = !hasSteps;
if (hasSteps) drawProblemSpans();
drawAlarms();
showAddress();
