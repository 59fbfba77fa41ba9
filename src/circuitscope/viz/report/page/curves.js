// The curves of one run over training: loss, accuracy, scores, and the order of its transitions.

const EVENT_ROW = 17;

class Curves extends Charts {
  /** `scores` are the names of all scores; `onPick(step)` is called where a person points. */
  constructor(run, scores, onPick) {
    const [first, last] = stepsOf(run);
    super({ first, last, checkpoints: run.steps, bumps: run.bumps, onPick });
    this.run = run;
    this.scores = scores;
    this.node.classList.add("curves");
    this.below = element("div", { class: "events" });
    this.picked = null;
  }

  /** The charts, as `chart` takes them. */
  charts() {
    const { train, validation } = this.run.curves;
    const out = [];
    const losses = [];
    if (train)
      losses.push({ name: "train", colour: "train", step: train.step, value: train.loss, thin: true });
    if (validation) losses.push(held(validation, "loss"));
    if (losses.length) {
      const high = Math.max(extent(losses.map(({ value }) => ({ value })))[1], 0.1);
      out.push({ slot: "loss", title: "Loss", lines: losses, low: 0, high, height: 118 });
    }
    if (validation) {
      const { chance, chance_words: level } = this.run;
      out.push({
        slot: "accuracy",
        title: capital(this.run.metric),
        lines: [held(validation, "accuracy")],
        low: 0,
        high: 1,
        height: 104,
        levels: chance ? [[`${level}: ${fraction(chance)}`, chance]] : [],
      });
    }
    const scores = this.run.headline.map(({ score, edges, place, chosen, step, value }) => {
      const name = `${words(edges)} ${place} (${chosen})`;
      return { name, colour: this.ink(score), step, value, dots: true };
    });
    const even = this.run.headline
      .filter((line) => line.even != null && line.step.length > 1)
      .map(({ score, step, even: level }) => {
        const ends = [step[0], step.at(-1)];
        const value = [level, level];
        return { name: "even", colour: this.ink(score), step: ends, value, dotted: true, silent: true };
      });
    const picked = (this.picked?.lines ?? []).map((line) => {
      return { ...line, colour: this.ink(line.score), dashed: true };
    });
    if (scores.length) {
      const [low, high] = extent([...scores, ...picked]);
      out.push({
        slot: "scores",
        title: `Scores: share of the weight${even.length ? " (dotted: even weights)" : ""}`,
        lines: [...even, ...scores, ...picked],
        low: Math.min(0, low),
        high: Math.max(1, high),
        height: 118,
        note: picked.length ? `picked: ${this.picked.name}` : null,
      });
    }
    return out;
  }

  /** Shows the scores of what is picked beside the strongest places: { name, lines }. */
  pick(picked) {
    this.picked = picked;
    this.draw();
  }

  /** The colour of a curve: the loss and the accuracy have their own, scores have theirs. */
  ink(name) {
    return name === "loss" || name === "accuracy" ? name : scoreInk(this.scores, name);
  }

  draw() {
    this.width = this.node.clientWidth;
    if (!this.width) return;
    this.forget();
    const charts = this.charts();
    const parts = charts.map((chart, i) => this.chart(chart, i === charts.length - 1 ? "step" : null));
    this.node.replaceChildren(...parts);
    if (this.run.events.length) this.below.replaceChildren(this.events());
    this.cursor(this.step ?? this.run.steps.at(-1));
  }

  /** When each curve turns: from 10% to 90% of its transition, a dot at the midpoint, a line over its interval. */
  events() {
    const { events } = this.run;
    const height = events.length * EVENT_ROW + 4;
    const svg = this.canvas(height, "Transitions in order");
    svg.append(...this.shades(0, height));
    events.forEach((event, row) => {
      const y = row * EVENT_ROW + EVENT_ROW / 2 + 2;
      const colour = paint(this.ink(event.of));
      const [from, to, middle] = [event.onset, event.end, event.midpoint].map((step) => this.x(step));
      const bar = drawing("line", { class: "event", x1: from, x2: Math.max(to, from + 1), y1: y, y2: y });
      const dot = drawing("circle", { cx: middle, cy: y, r: 3.5 });
      const [low, high] = [event.low ?? event.midpoint, event.high ?? event.midpoint].map((step) =>
        this.x(step),
      );
      const interval = drawing("line", { class: "interval", x1: low, x2: high, y1: y, y2: y });
      bar.style.stroke = dot.style.fill = interval.style.stroke = colour;
      const [start, stop] = [Math.min(from, low), Math.max(to, high)];
      const room = Math.max(start, this.width - stop) - 10;
      const turn = event.size > 0 ? "rises" : "falls";
      const name = words(event.curve);
      const level = event.ends_at ? ` (to the ${event.ends_at} level)` : "";
      const full = `${name} ${turn}, ${Math.round(event.onset)} to ${Math.round(event.end)}${level}`;
      const text = fitting([full, name], room);
      const isRight = this.width - stop >= start;
      const place = isRight
        ? { x: stop + 8, "text-anchor": "start" }
        : { x: start - 8, "text-anchor": "end" };
      svg.append(bar, interval, dot, drawing("text", { class: "tick", y: y + 3.5, ...place }, text));
    });
    svg.append(this.cursorLine(0, height));
    return element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("strong", {}, "Order of transitions")),
      svg,
    );
  }
}

/** The first and the last step of a run that anything is known of. */
function stepsOf({ steps, curves: { train, validation } }) {
  const last = Math.max(steps.at(-1), validation?.step.at(-1) ?? 0, train?.step.at(-1) ?? 0, 1);
  return [Math.min(steps[0], validation?.step[0] ?? steps[0]), last];
}

/** A curve of the validation set with the spread over its batches. */
function held(validation, what) {
  const [low, high] = [validation[`${what}_low`], validation[`${what}_high`]];
  return { name: "validation", colour: what, step: validation.step, value: validation[what], low, high };
}

/** The first of some texts that fits a width, else the last one cut short. */
function fitting(texts, width) {
  const most = Math.floor(width / 6.2);
  return texts.find((text) => text.length <= most) ?? `${texts.at(-1).slice(0, Math.max(most - 1, 0))}…`;
}
