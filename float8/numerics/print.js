// Printing: everything that says what is wrong is on paper, opened, and nothing that only a screen
// can do. page.css has the rest of the layout.

const PRINTED_WIDTH = 960; // of the table, in CSS pixels: A4 or Letter, landscape
const PRINTED_ROWS = 200; // beside those that want a look
let before = null; // what the page showed

// Every cast that wants a look, and the first others, in their order.
function rowsToPrint(rows) {
  let free = PRINTED_ROWS;
  return rows.filter((row) => row.level > 0 || free-- > 0);
}
addEventListener("beforeprint", () => {
  if (printing) return;
  hideTip();
  const closed = [...document.querySelectorAll("#legend:not([open])")];
  before = { open: [...openCasts], closed };
  printing = true;
  for (const problem of run.snapshots[state.step].problems) openCasts.add(problem.cast);
  draw(); // which makes the health anew
  byId("app").append(byId("legend")); // the findings first
  for (const details of document.querySelectorAll("main details")) details.open = true;
});
addEventListener("afterprint", () => {
  if (!printing) return;
  printing = false;
  openCasts.clear();
  before.open.forEach((cast) => openCasts.add(cast));
  draw();
  byId("tiles").after(byId("legend"));
  for (const details of before.closed) details.open = false;
});
