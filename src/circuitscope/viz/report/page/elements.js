// Making elements. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A small table of text; a column that is blank in every row is left out. */
function table({ columns, rows }) {
  const shown = columns.map((_, i) => i).filter((i) => rows.some((row) => row[i]));
  const line = (tag, cells) => element("tr", {}, ...shown.map((i) => element(tag, {}, cells[i])));
  return element(
    "div",
    { class: "table" },
    element("table", {}, line("th", columns), ...rows.map((row) => line("td", row))),
  );
}

/** A labelled select; `choices` are [value, text] pairs, put in with `offer`. */
function picker(name, onPick) {
  const select = element("select", { "aria-label": name });
  select.addEventListener("change", () => onPick(select.value));
  const label = element("label", { class: "picker" }, element("span", {}, name), select);
  return { label, select };
}

function offer(select, choices, chosen) {
  select.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
  select.value = String(chosen);
}

/** Three digits that matter, without an exponent where a person would not write one. */
function number(value, digits = 3) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5))
    return signs(value.toExponential(digits - 1));
  return signs(String(Number(value.toPrecision(digits))));
}

function signs(text) {
  return text.replace("e+", "e").replaceAll("-", "−");
}

/** Position of the entry of a sorted list that is nearest to a value. */
function nearest(sorted, value) {
  let best = 0;
  for (let i = 1; i < sorted.length; i++) {
    if (Math.abs(sorted[i] - value) <= Math.abs(sorted[best] - value)) best = i;
  }
  return best;
}
