// The page: a table and an overlay of all runs, the chosen ones side by side, sliders that are linked, keys, the theme.

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
const TOGETHER = 3; // so many runs are all shown at first; of more, the first two
const link = picker("sliders", () => follow(active));
offer(
  link.select,
  [
    ["step", "linked by step"],
    ["share", "linked by share of training"],
    ["off", "not linked"],
  ],
  several ? "step" : "off",
);

const made = new Map(); // panels by the number of their run, made when they are first shown
const home = document.getElementById("runs");
const overlay = several ? new Overlay(data.runs, (step) => active.move(nearest(active.run.steps, step))) : null;
let shown = []; // panels
let active;

function panelOf(number) {
  if (!made.has(number)) {
    const panel = new Panel(data.runs[number], number, data, {
      onMove: follow,
      onExample: (moved) => others(moved).forEach((p) => p.setExample(moved.example)),
      onToggle: (name, isOpen) => shown.forEach((p) => p.toggle(name, isOpen)),
    });
    for (const kind of ["pointerdown", "focusin"])
      panel.node.addEventListener(kind, () => activate(panel));
    made.set(number, panel);
  }
  return made.get(number);
}

/** Shows these runs side by side; those that are new go where the active one is. */
function choose(numbers) {
  const before = shown;
  shown = numbers.map(panelOf);
  before.filter((panel) => !shown.includes(panel)).forEach((panel) => panel.play(false));
  home.classList.toggle("several", shown.length > 1);
  home.replaceChildren(...shown.map((panel) => panel.node));
  if (!shown.includes(active)) activate(shown.find((panel) => before.includes(panel)) ?? shown[0]);
  for (const { dataset, open } of active.details) shown.forEach((panel) => panel.toggle(dataset.name, open));
  if (before.length) follow(active);
}

function activate(panel) {
  active = panel;
  overlay?.cursor(panel.run.steps[panel.at]);
}

function others(panel) {
  return link.select.value === "off" ? [] : shown.filter((other) => other !== panel);
}

/** Moves the other runs to the checkpoint nearest to where this one is. */
function follow(panel) {
  const { steps } = panel.run;
  if (panel === active) overlay?.cursor(steps[panel.at]);
  for (const other of others(panel)) {
    const share = (steps[panel.at] - steps[0]) / (steps.at(-1) - steps[0] || 1);
    const [first, last] = [other.run.steps[0], other.run.steps.at(-1)];
    const wanted = link.select.value === "share" ? first + share * (last - first) : steps[panel.at];
    other.show(nearest(other.run.steps, wanted));
  }
}

const first = data.runs.map((_, i) => i).slice(0, data.runs.length > TOGETHER ? 2 : TOGETHER);
document.title = `${data.runs.map((run) => run.name).join(", ")} · circuitscope`;
document.getElementById("top").append(element("h1", {}, "circuitscope"));
if (several)
  document.getElementById("top").append(element("div", { class: "controls" }, overlay.scale.label, link.label));
document
  .getElementById("about")
  .append(`circuitscope ${data.version}. This file holds all it shows and loads nothing.`);
if (several) {
  const table = new RunsTable(data.runs, data.table, first, {
    onChoose: choose,
    onLight: (number) => overlay.light(number),
  });
  document.getElementById("together").append(table.node, overlay.node);
}
choose(first);

const KEYS = {
  ArrowLeft: () => active.move(active.at - 1),
  ArrowRight: () => active.move(active.at + 1),
  ArrowUp: () => active.stepHead(-1),
  ArrowDown: () => active.stepHead(1),
  Home: () => active.move(0),
  End: () => active.move(active.run.steps.length - 1),
  " ": () => active.play(!active.playing),
};

document.addEventListener("keydown", (event) => {
  const own = event.target.closest("select, button, summary, pre, input[type=checkbox]");
  const typed = own && (own.matches("select, pre") || event.key === " ");
  if (event.ctrlKey || event.metaKey || event.altKey || typed || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

darkness.addEventListener("change", () => shown.forEach((panel) => panel.draw()));
Promise.all(shown.map((panel) => panel.ready)).then(() => {
  performance.measure("open", { start: 0 });
  document.documentElement.dataset.ready = "yes";
});
