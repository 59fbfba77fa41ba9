// The page: all runs side by side, their sliders linked, the keyboard, the theme.

const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
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

const panels = data.runs.map(
  (run, i) =>
    new Panel(run, i, data, {
      onMove: follow,
      onExample: (panel) => others(panel).forEach((p) => p.setExample(panel.example)),
    }),
);
let active = panels[0];

document.title = `${data.runs.map((run) => run.name).join(", ")} · circuitscope`;
document.getElementById("top").append(element("h1", {}, "circuitscope"), several ? link.label : "");
document
  .getElementById("about")
  .append(`circuitscope ${data.version}. This file holds all it shows and loads nothing.`);
const home = document.getElementById("runs");
home.classList.toggle("several", several);
home.append(...panels.map((panel) => panel.node));
panels.forEach((panel) => {
  for (const kind of ["pointerdown", "focusin"]) panel.node.addEventListener(kind, () => (active = panel));
});

function others(panel) {
  return link.select.value === "off" ? [] : panels.filter((other) => other !== panel);
}

/** Moves the other runs to the checkpoint nearest to where this one is. */
function follow(panel) {
  const { steps } = panel.run;
  for (const other of others(panel)) {
    const share = (steps[panel.at] - steps[0]) / (steps.at(-1) - steps[0] || 1);
    const [first, last] = [other.run.steps[0], other.run.steps.at(-1)];
    const wanted = link.select.value === "share" ? first + share * (last - first) : steps[panel.at];
    other.show(nearest(other.run.steps, wanted));
  }
}

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
  const own = event.target.closest("select, button, summary, pre");
  const typed = own && (own.matches("select, pre") || event.key === " ");
  if (event.ctrlKey || event.metaKey || event.altKey || typed || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

darkness.addEventListener("change", () => panels.forEach((panel) => panel.draw()));
Promise.all(panels.map((panel) => panel.ready)).then(() => {
  performance.measure("open", { start: 0 });
  document.documentElement.dataset.ready = "yes";
});
