// The explanations of the columns, which page.html holds in its legend, shown where a column's name
// stands: at a mouse pointer, at the focus of a keyboard, and after a tap.

const explanationOf = (key) => byId(`explain-${key}`);
const hasExplanation = (key) => explanationOf(key) !== null;
const nameOfColumn = (key) =>
  hasExplanation(key) ? explanationOf(key).querySelector("dt").textContent : "Format";

// A name with its explanation. It is a button, so that a keyboard and a finger reach it.
function explained(key, attributes = {}, name = nameOfColumn(key)) {
  const explanation = hasExplanation(key)
    ? { "data-explain": key, "aria-describedby": `explain-${key}` } : {};
  const classes = `term ${attributes.class ?? ""}`.trim();
  return element("button", { type: "button", ...attributes, ...explanation, class: classes },
    element("span", { class: "name" }, name));
}

const tip = byId("tip");
let tipOwner = null, tipTimer = 0;
const isTipShown = () => !tip.hidden;
function showTip(owner) {
  clearTimeout(tipTimer);
  tipOwner = owner;
  tip.replaceChildren(...explanationOf(owner.dataset.explain).cloneNode(true).children);
  tip.hidden = false;
  const place = owner.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const right = document.documentElement.clientWidth - size.width - 8;
  const above = place.top - size.height - 6;
  const top = above >= 8 ? above : place.bottom + 6;
  tip.style.left = `${Math.max(8, Math.min(place.left - 8, right)) + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}
function hideTip() {
  clearTimeout(tipTimer);
  tip.hidden = true;
  tipOwner = null;
}
const later = (action, milliseconds) => {
  clearTimeout(tipTimer);
  tipTimer = setTimeout(action, milliseconds);
};
const ownerOf = (target) => (target instanceof Element ? target.closest("[data-explain]") : null);

addEventListener("pointerover", (event) => {
  if (event.pointerType === "touch") return; // a tap is a click
  const owner = ownerOf(event.target);
  if (owner && owner === tipOwner) clearTimeout(tipTimer);
  else if (owner) later(() => showTip(owner), 250);
  else if (tip.contains(event.target)) clearTimeout(tipTimer); // its text may be selected
  else if (isTipShown() && !tipOwner.contains(document.activeElement)) later(hideTip, 200);
  else if (!isTipShown()) clearTimeout(tipTimer);
});
addEventListener("focusin", (event) => {
  const owner = ownerOf(event.target);
  if (owner?.matches(":focus-visible")) showTip(owner);
  else if (owner !== tipOwner) hideTip();
});
addEventListener("focusout", (event) => {
  if (ownerOf(event.target) === tipOwner) hideTip();
});
addEventListener("click", (event) => {
  const owner = ownerOf(event.target);
  if (owner) showTip(owner);
  else if (!tip.contains(event.target)) hideTip();
});
byId("scroll").addEventListener("scroll", hideTip);
addEventListener("resize", hideTip);
