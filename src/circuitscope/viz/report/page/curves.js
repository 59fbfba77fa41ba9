// Curves over training on one step axis, with a cursor at the checkpoint that is shown.

const MARGIN = { left: 46, right: 14, top: 8, bottom: 6 };
const AXIS = 20;
const EVENT_ROW = 17;

class Curves {
  /** `onPick(step)` is called where a person points. */
  constructor(run, scores, onPick) {
    this.run = run;
    this.scores = scores;
    this.onPick = onPick;
    this.cursors = [];
    this.readers = [];
    this.node = element("div", { class: "curves" });
    this.below = element("div", { class: "events" });
    this.last = Math.max(
      run.steps.at(-1),
      run.curves.validation?.step.at(-1) ?? 0,
      run.curves.train?.step.at(-1) ?? 0,
      1,
    );
    this.first = Math.min(run.steps[0], run.curves.validation?.step[0] ?? run.steps[0]);
    this.picked = null;
  }

  /** The charts, each { title, lines, low, high, height, level, note }. */
  charts() {
    const { train, validation } = this.run.curves;
    const out = [];
    const losses = [];
    if (train)
      losses.push({ name: "train", colour: "train", step: train.step, value: train.loss, thin: true });
    if (validation) losses.push(held(validation, "loss"));
    const every = losses.flatMap((line) => line.value).filter((value) => value != null);
    if (losses.length)
      out.push({ title: "Loss", lines: losses, low: 0, high: Math.max(...every, 0.1), height: 118 });
    if (validation) {
      const { chance } = this.run;
      const level = chance && { value: chance, name: `any value of the context: ${fraction(chance)}` };
      out.push({
        title: "Accuracy",
        lines: [held(validation, "accuracy")],
        low: 0,
        high: 1,
        height: 104,
        level,
      });
    }
    const scores = this.run.headline.map(({ score, place, step, value }) => {
      return { name: `${words(score)} ${place}`, colour: this.ink(score), step, value, dots: true };
    });
    const picked = (this.picked?.lines ?? []).map((line) => {
      return { ...line, colour: this.ink(line.score), dashed: true };
    });
    if (scores.length) {
      const note = picked.length ? `picked: ${this.picked.name}` : null;
      const values = [...scores, ...picked].flatMap((line) => line.value).filter((value) => value != null);
      out.push({
        title: "Scores: share of the weight",
        lines: [...scores, ...picked],
        low: Math.min(0, ...values),
        high: Math.max(1, ...values),
        height: 118,
        note,
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

  x(step) {
    const span = this.width - MARGIN.left - MARGIN.right;
    return MARGIN.left + (span * (step - this.first)) / (this.last - this.first || 1);
  }

  stepAt(x) {
    const span = this.width - MARGIN.left - MARGIN.right;
    return this.first + ((x - MARGIN.left) / span) * (this.last - this.first);
  }

  draw() {
    this.width = this.node.clientWidth;
    if (!this.width) return;
    this.cursors = [];
    this.readers = [];
    const charts = this.charts();
    const parts = charts.map((chart, i) => this.chart(chart, i === charts.length - 1));
    this.node.replaceChildren(...parts);
    if (this.run.events.length) this.below.replaceChildren(this.events());
    this.cursor(this.step ?? this.run.steps.at(-1));
  }

  /** Moves the cursor and the numbers beside the names. */
  cursor(step) {
    this.step = step;
    const x = this.x(step);
    for (const line of this.cursors) {
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
    for (const [node, line] of this.readers) node.textContent = number(line.value[nearest(line.step, step)]);
  }

  chart({ title, lines, low, high, level, height, note }, hasAxis) {
    const bottom = height - MARGIN.bottom;
    const y = (value) => bottom - ((bottom - MARGIN.top) * (value - low)) / (high - low);
    const svg = this.canvas(height + (hasAxis ? AXIS : 0), `${title} over training`);
    svg.append(...this.shades(MARGIN.top, bottom));
    for (const tick of ticks(low, high, 3)) {
      svg.append(
        drawing("line", {
          class: "grid",
          x1: MARGIN.left,
          x2: this.width - MARGIN.right,
          y1: y(tick),
          y2: y(tick),
        }),
        drawing(
          "text",
          { class: "tick", x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end" },
          number(tick),
        ),
      );
    }
    if (level) {
      svg.append(
        drawing("line", {
          class: "level",
          x1: MARGIN.left,
          x2: this.width - MARGIN.right,
          y1: y(level.value),
          y2: y(level.value),
        }),
        drawing(
          "text",
          {
            class: "tick level-name",
            x: this.width - MARGIN.right - 2,
            y: y(level.value) - 4,
            "text-anchor": "end",
          },
          level.name,
        ),
      );
    }
    for (const line of lines) {
      if (line.low) svg.append(this.path(band(line, this, y), line, "band"));
      svg.append(this.path(trace(line.step, line.value, this, y), line, "line"));
      if (line.dots && line.step.length < 60) svg.append(...this.dots(line, y));
    }
    if (hasAxis) svg.append(...this.axis(bottom));
    svg.append(this.cursorLine(MARGIN.top, bottom));
    const names = lines
      .filter((line) => !line.dashed)
      .map((line) => {
        const value = element("b");
        this.readers.push([value, line]);
        const mark = element("i", { class: line.thin ? "mark thin" : "mark" });
        mark.style.background = `var(--${line.colour})`;
        return element("span", { class: "name" }, mark, `${line.name} `, value);
      });
    const aside = note
      ? element("span", { class: "name" }, element("i", { class: "mark dashed" }), note)
      : null;
    return element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("strong", {}, title), ...names, aside),
      svg,
    );
  }

  /** When each curve turns: from 10% to 90% of its transition, a dot at the midpoint, a line over its interval. */
  events() {
    const { events } = this.run;
    const height = events.length * EVENT_ROW + 4;
    const svg = this.canvas(height, "Transitions in order");
    svg.append(...this.shades(0, height));
    events.forEach((event, row) => {
      const y = row * EVENT_ROW + EVENT_ROW / 2 + 2;
      const colour = `var(--${this.ink(event.of)})`;
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
      const full = `${name} ${turn}, ${Math.round(event.onset)} to ${Math.round(event.end)}`;
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

  canvas(height, name) {
    const svg = drawing("svg", { width: this.width, height, role: "img", "aria-label": name });
    const point = (event) => this.onPick(this.stepAt(event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener("pointerdown", (event) => {
      svg.setPointerCapture(event.pointerId);
      point(event);
    });
    svg.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) point(event);
    });
    return svg;
  }

  shades(top, bottom) {
    return this.run.bumps.map(([from, to]) =>
      drawing("rect", {
        class: "bump",
        x: this.x(from),
        width: Math.max(this.x(to) - this.x(from), 1),
        y: top,
        height: bottom - top,
      }),
    );
  }

  cursorLine(top, bottom) {
    const line = drawing("line", { class: "cursor", y1: top, y2: bottom });
    this.cursors.push(line);
    return line;
  }

  path(d, line, kind) {
    const path = drawing("path", {
      d,
      class: `${kind}${line.thin ? " thin" : ""}${line.dashed ? " dashed" : ""}`,
    });
    path.style[kind === "band" ? "fill" : "stroke"] = `var(--${line.colour})`;
    return path;
  }

  dots(line, y) {
    return line.step.flatMap((step, i) => {
      if (line.value[i] == null) return [];
      const dot = drawing("circle", { cx: this.x(step), cy: y(line.value[i]), r: 1.8 });
      dot.style.fill = `var(--${line.colour})`;
      return [dot];
    });
  }

  /** Numbers at round steps, and a short mark at every checkpoint. */
  axis(bottom) {
    const marks = this.run.steps.map((step) =>
      drawing("line", {
        class: "checkpoint",
        x1: this.x(step),
        x2: this.x(step),
        y1: bottom + 2,
        y2: bottom + 5,
      }),
    );
    const most = Math.max(2, Math.floor(this.width / 90));
    const labels = ticks(this.first, this.last, most).map((step) => {
      const far = this.x(step) > this.width - 24;
      return drawing(
        "text",
        {
          class: "tick",
          x: far ? this.width - 2 : this.x(step),
          y: bottom + 17,
          "text-anchor": far ? "end" : "middle",
        },
        String(step),
      );
    });
    return [...marks, ...labels];
  }
}

/** A curve of the validation set with the spread over its batches. */
function held(validation, what) {
  const [low, high] = [validation[`${what}_low`], validation[`${what}_high`]];
  return { name: "validation", colour: what, step: validation.step, value: validation[what], low, high };
}

/** About this many round numbers between two values. */
function ticks(low, high, about) {
  const rough = (high - low || 1) / about;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].map((m) => m * unit).find((size) => size >= rough);
  const out = [];
  for (let i = Math.ceil(low / every); i * every <= high * (1 + 1e-9); i++)
    out.push(Number((i * every).toPrecision(6)));
  return out;
}

/** The first of some texts that fits a width, else the last one cut short. */
function fitting(texts, width) {
  const most = Math.floor(width / 6.2);
  return texts.find((text) => text.length <= most) ?? `${texts.at(-1).slice(0, Math.max(most - 1, 0))}…`;
}

/** A path through the points, broken where there is no number. */
function trace(steps, values, curves, y) {
  let d = "";
  let broken = true;
  steps.forEach((step, i) => {
    if (values[i] == null) broken = true;
    else {
      d += `${broken ? "M" : "L"}${curves.x(step).toFixed(1)},${y(values[i]).toFixed(1)}`;
      broken = false;
    }
  });
  return d;
}

function band({ step, low, high }, curves, y) {
  const kept = step.map((_, i) => i).filter((i) => low[i] != null && high[i] != null);
  if (kept.length < 2) return "";
  const point = (values) => (i) => `${curves.x(step[i]).toFixed(1)},${y(values[i]).toFixed(1)}`;
  return `M${kept.map(point(high)).join("L")}L${kept.reverse().map(point(low)).join("L")}Z`;
}

/** 1/4 where a number is one over a whole number, else a percentage. */
function fraction(value) {
  const whole = Math.round(1 / value);
  return Math.abs(value * whole - 1) < 1e-6 ? `1/${whole}` : `${number(100 * value)}%`;
}

function words(name) {
  return name.replaceAll("_", " ");
}
