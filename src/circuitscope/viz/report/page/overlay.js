// The loss and the accuracy of all runs over each other, one colour for each run, its bump in its colour.

const HIGH = 190;

class Overlay {
  /** `onPick(step)` is called where a person points. */
  constructor(runs, onPick) {
    this.runs = runs;
    const ends = runs.map(stepsOf);
    const bumps = runs.flatMap((run, i) => run.bumps.map(([from, to]) => [from, to, runInk(i)]));
    const axis = {
      first: Math.min(...ends.map(([first]) => first)),
      last: Math.max(...ends.map(([, last]) => last)),
      bumps,
      onPick,
    };
    this.parts = ["loss", "accuracy"].map((what) => ({ what, charts: new Charts(axis) }));
    this.scale = picker("steps", () => this.draw());
    offer(
      this.scale.select,
      [
        ["linear", "linear"],
        ["log", "logarithmic"],
      ],
      "linear",
    );
    this.node = element("div", { class: "overlay" }, ...this.parts.map(({ charts }) => charts.node));
    new ResizeObserver(() => this.resize()).observe(this.node);
  }

  resize() {
    if (this.parts.some(({ charts }) => charts.node.clientWidth !== charts.width)) this.draw();
  }

  draw() {
    for (const { what, charts } of this.parts) {
      charts.width = charts.node.clientWidth;
      if (!charts.width) continue;
      charts.isLog = this.scale.select.value === "log";
      charts.forget();
      const figure = charts.chart(this.chart(what), "step");
      figure.querySelectorAll("path.line").forEach((path, i) => (path.dataset.run = this.drawn(what)[i]));
      charts.node.replaceChildren(figure);
      if (this.step != null) charts.cursor(this.step);
    }
    if (this.lit != null) this.light(this.lit);
  }

  /** Numbers of the runs that have a curve. */
  drawn(what) {
    return this.runs.map((_, i) => i).filter((i) => this.runs[i].curves.validation?.[what]);
  }

  chart(what) {
    const lines = this.drawn(what).map((i) => {
      const { name, curves } = this.runs[i];
      const { step, [what]: value } = curves.validation;
      return { name, colour: runInk(i), step, value, dotted: i >= RUN_INKS };
    });
    const [, most] = extent(lines);
    const named = this.runs.filter(({ chance }) => chance).map(({ chance, chance_words: level }) => [level, chance]);
    const chances = [...new Map(named.map((one) => [one.join(), one])).values()];
    return what === "loss"
      ? { title: "Validation loss", lines, low: 0, high: Math.max(most, 0.1), height: HIGH }
      : {
          title: `Validation ${[...new Set(this.runs.map(({ metric }) => metric))].join(" or ")}`,
          lines,
          low: 0,
          high: Math.max(most, 1),
          height: HIGH,
          levels: chances.map(([level, chance]) => [`${level}: ${fraction(chance)}`, chance]),
        };
  }

  cursor(step) {
    this.step = step;
    for (const { charts } of this.parts) charts.cursor(step);
  }

  /** Dims the curves of all runs but one; null dims none. */
  light(number) {
    this.lit = number;
    for (const path of this.node.querySelectorAll("path.line"))
      path.classList.toggle("dim", number != null && path.dataset.run !== String(number));
  }
}
