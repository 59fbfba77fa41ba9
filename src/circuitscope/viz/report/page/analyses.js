// What analyses found in a run: small charts and words, in a part of the page that opens when it is asked for.

const SMALL = 130;
const SHOWN = 6; // faint curves beside the one of the checkpoint that is shown

class Analysis {
  /** `onToggle(name, isOpen)` is called when it is opened or closed. */
  constructor(run, { name, about, said, charts }, onToggle) {
    this.charts = charts.map((chart) => new KINDS[chart.kind](run, chart));
    const told = said.map((line) => (typeof line === "string" ? element("p", {}, line) : table(line)));
    this.node = element(
      "details",
      { "data-name": name },
      element("summary", {}, capital(words(name))),
      element("p", { class: "muted" }, about),
      this.charts.length ? element("div", { class: "small-charts" }, ...this.charts.map((c) => c.node)) : null,
      ...told,
    );
    this.node.addEventListener("toggle", () => {
      this.draw();
      onToggle(name, this.node.open);
    });
    for (const chart of this.charts) {
      new ResizeObserver(() => {
        if (this.node.open && chart.node.clientWidth !== chart.width) chart.draw();
      }).observe(chart.node);
    }
  }

  draw() {
    if (this.node.open) this.charts.forEach((chart) => chart.draw());
  }

  cursor(step) {
    for (const chart of this.charts) chart.cursor(step, this.node.open);
  }
}

/** Curves over training steps. */
class OverSteps extends Charts {
  constructor(run, { title, lines, levels }) {
    const [first, last] = stepsOf(run);
    super({ first, last, bumps: run.bumps });
    this.told = { title, levels };
    this.lines = lines.map((line, i) => ({ ...line, colour: `score-${i % SCORE_INKS}`, dots: true }));
    this.step = run.steps.at(-1);
  }

  draw() {
    this.width = this.node.clientWidth;
    if (!this.width) return;
    this.forget();
    const [low, high] = extent([...this.lines, { value: this.told.levels.map(([, value]) => value) }]);
    const bounded = low >= 0 && high <= 1;
    const room = { low: bounded ? 0 : Math.min(low, 0), high: bounded && high > 0.5 ? 1 : Math.max(high, 0) };
    this.node.replaceChildren(this.chart({ ...this.told, ...room, lines: this.lines, height: SMALL }, "step"));
    this.cursor(this.step);
  }
}

/** A curve for each of some checkpoints over something else; the one nearest to the slider is drawn strongly. */
class AtSteps extends Charts {
  constructor(run, chart) {
    super({ first: chart.at[0], last: chart.at.at(-1) });
    this.told = chart;
    this.now = run.steps.at(-1);
  }

  cursor(step, isOpen) {
    this.now = step;
    if (isOpen) this.draw();
  }

  draw() {
    this.width = this.node.clientWidth;
    if (!this.width) return;
    this.forget();
    const { title, x, at, step, values, log } = this.told;
    const now = nearest(step, this.now);
    const every = Math.max(1, Math.ceil((step.length - 1) / SHOWN));
    const faint = step.map((_, i) => i).filter((i) => i !== now && (i % every === 0 || i === step.length - 1));
    const [low, high] = extent(values.map((value) => ({ value })));
    const bottom = log ? Math.max(low, high * 10 ** -DECADES) : Math.min(low, 0);
    const line = (i, more) => {
      const value = values[i].map((v) => (v == null || v < bottom ? null : v));
      return { name: `step ${step[i]}`, colour: inTime(i / (step.length - 1 || 1)), step: at, value, ...more };
    };
    const lines = [
      ...faint.map((i) => line(i, { thin: true, silent: true })),
      line(now, { silent: true, dots: at.length <= 20 }),
    ];
    const figure = this.chart({ title, lines, low: bottom, high, height: SMALL, isLog: log }, x);
    const caption = (i, text) => named(text, "", "background", inTime(i / (step.length - 1 || 1)));
    const ends = [0, step.length - 1].filter((i) => i !== now);
    figure.firstChild.append(
      element("b", {}, caption(now, `step ${step[now]}`)),
      ...ends.map((i) => caption(i, `step ${step[i]}`)),
    );
    figure.querySelector(".cursor").remove();
    this.node.replaceChildren(figure);
  }
}

/** From the colour of the start of training to that of its end. */
function inTime(share) {
  return `color-mix(in oklab, var(--late) ${Math.round(100 * share)}%, var(--early))`;
}

/** Named numbers with their standard errors. */
class Bars {
  constructor(run, { title, bars, rest }) {
    const most = Math.max(...bars.map(([, value, error]) => Math.abs(value ?? 0) + (error ?? 0)), 1);
    const least = Math.min(...bars.map(([, value]) => value ?? 0), 0);
    const place = (value) => (100 * (value - least)) / (most - least);
    this.node = element(
      "figure",
      { class: "chart bars" },
      element("figcaption", {}, element("strong", {}, capital(title))),
      ...bars.flatMap(([name, value, error]) => {
        const fill = element("i", { class: "fill" });
        fill.style.left = `${place(Math.min(value ?? 0, 0))}%`;
        fill.style.width = `${place(Math.max(value ?? 0, 0)) - place(Math.min(value ?? 0, 0))}%`;
        const whisker = element("i", { class: "whisker" });
        whisker.style.left = `${place((value ?? 0) - (error ?? 0))}%`;
        whisker.style.width = `${place((value ?? 0) + (error ?? 0)) - place((value ?? 0) - (error ?? 0))}%`;
        const said = error == null ? number(value, 2) : `${number(value, 2)} ± ${number(error, 1)}`;
        return [
          element("span", { class: "bar-name" }, name),
          element("span", { class: "bar-room" }, fill, error ? whisker : null),
          element("b", {}, said),
        ];
      }),
      rest ? element("span", { class: "bar-name" }, rest) : null,
    );
  }

  draw() {}

  cursor() {}
}

const KINDS = { OverSteps, AtSteps, Bars };
