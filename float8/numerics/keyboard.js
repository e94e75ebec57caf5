// Keys beside those that buttons, menus and the slider have by themselves: arrows move between the
// rows and between the headers, right and left open and close a row, Escape closes what is open.

const rowButtons = () => [...document.querySelectorAll("td.layer button")];
const headButtons = () => [...byId("head").querySelectorAll("button")];
// The button of the row that a node belongs to, also where the node is in its opened part.
function rowButtonOf(node) {
  const tr = node.closest("tr.cast, tr.detail");
  const cast = tr?.matches(".detail") ? tr.previousElementSibling : tr;
  return cast?.querySelector("td.layer button");
}
const isOpen = (button) => button.getAttribute("aria-expanded") === "true";
const moves = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 };
function moved(buttons, from, key) {
  if (key === "Home") return buttons[0];
  if (key === "End") return buttons.at(-1);
  return buttons[buttons.indexOf(from) + moves[key]];
}
function onRowKey(button, key) {
  if (key === "ArrowRight" || key === "ArrowLeft") {
    if (isOpen(button) !== (key === "ArrowRight")) button.click();
    return true;
  }
  if (!["ArrowDown", "ArrowUp", "Home", "End"].includes(key)) return false;
  const atEnd = rowButtons().at(-1) === button;
  if (key === "ArrowDown" && atEnd && drawn < shown.length) drawMore();
  if (key === "ArrowUp" && rowButtons()[0] === button) headButtons()[0].focus();
  else moved(rowButtons(), button, key)?.focus();
  return true;
}
function onHeadKey(button, key) {
  if (key === "ArrowDown") rowButtons()[0]?.focus();
  else if (["ArrowRight", "ArrowLeft", "Home", "End"].includes(key))
    moved(headButtons(), button, key)?.focus();
  else return false;
  return true;
}
function onEscape(target) {
  const button = rowButtonOf(target), details = target.closest("details[open]");
  if (isTipShown()) hideTip();
  else if (target === byId("filter") && state.filter) {
    state.filter = target.value = "";
    drawTable();
  } else if (button && isOpen(button)) {
    button.click();
    button.focus();
  } else if (details) {
    details.open = false;
    details.querySelector("summary").focus();
  } else return false;
  return true;
}
addEventListener("keydown", (event) => {
  const { target, key } = event;
  if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  let done = false;
  if (key === "Escape") done = onEscape(target);
  else if (target.matches("td.layer button")) done = onRowKey(target, key);
  else if (target.closest("#head")) done = onHeadKey(target, key);
  else if (target === byId("filter") && key === "ArrowDown") done = onHeadKey(target, key);
  if (done) event.preventDefault();
});
