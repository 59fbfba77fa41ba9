// Charts that share one horizontal axis: training steps, with a cursor at the checkpoint that is shown, or lags.

const MARGIN = { left: 46, right: 14, top: 8, bottom: 6 };
const AXIS = 20;
const DECADES = 8; // at most so many on a logarithmic axis

class Charts {
  /** `bumps` are [first, last, colour] to shade; `onPick(step)` is called where a person points. */
  constructor({ first = 0, last = 1, checkpoints = [], bumps = [], onPick = null } = {}) {
    Object.assign(this, { first, last, checkpoints, bumps, onPick });
    this.isLog = false; // whether steps have a logarithmic axis
    this.forget();
    this.node = element("div", { class: "charts" });
  }

  /** Before everything is drawn again. */
  forget() {
    this.cursors = [];
    this.readers = [];
  }

  x(step) {
    const span = this.width - MARGIN.left - MARGIN.right;
    const place = (s) => (this.isLog ? Math.log1p(s) : s);
    const [from, to] = [place(this.first), place(this.last)];
    return MARGIN.left + (span * (place(step) - from)) / (to - from || 1);
  }

  stepAt(x) {
    const span = this.width - MARGIN.left - MARGIN.right;
    const place = (s) => (this.isLog ? Math.log1p(s) : s);
    const at = place(this.first) + ((x - MARGIN.left) / span) * (place(this.last) - place(this.first));
    return this.isLog ? Math.expm1(at) : at;
  }

  /** Moves the cursor and the numbers beside the names. */
  cursor(step) {
    this.step = step;
    if (!this.width) return;
    const x = this.x(step);
    for (const line of this.cursors) {
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
    for (const [node, line] of this.readers) node.textContent = number(line.value[nearest(line.step, step)]);
  }

  /**
   * A chart: `lines` are { name, colour, step, value, low, high, thin, dashed, dotted, dots, silent }, `levels` are
   * [name, value] pairs to mark, `isLog` says whether values have a logarithmic axis, `slot` is its place among charts.
   */
  chart({ title, lines, low, high, levels = [], height, note, isLog, slot }, axis) {
    const bottom = height - MARGIN.bottom;
    const place = (value) => (isLog ? Math.log10(value) : value);
    const span = place(high) - place(low) || 1;
    const y = (value) => bottom - ((bottom - MARGIN.top) * (place(value) - place(low))) / span;
    const svg = this.canvas(height + (axis ? AXIS : 0), title);
    svg.append(...this.shades(MARGIN.top, bottom));
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    for (const tick of isLog ? decades(low, high) : ticks(low, high, 3)) {
      svg.append(
        drawing("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
        drawing("text", { class: "tick", x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, number(tick)),
      );
    }
    for (const [name, value] of levels) {
      svg.append(
        drawing("line", { class: "level", x1: left, x2: right, y1: y(value), y2: y(value) }),
        drawing("text", { class: "tick", x: right - 2, y: y(value) - 4, "text-anchor": "end" }, name),
      );
    }
    for (const line of lines) {
      if (line.low?.length) svg.append(this.path(band(line, this, y), line, "band"));
      svg.append(this.path(trace(line.step, line.value, this, y), line, "line"));
      if (line.dots && line.step.length < 60) svg.append(...this.dots(line, y));
    }
    if (axis) svg.append(...this.axis(bottom, axis));
    svg.append(this.cursorLine(MARGIN.top, bottom));
    const names = lines.filter((line) => !line.dashed && !line.silent).map((line) => this.nameOf(line));
    if (note) names.push(element("span", { class: "name" }, element("i", { class: "mark dashed" }), note));
    return element(
      "figure",
      { class: slot ? `chart ${slot}` : "chart" },
      element("figcaption", {}, element("strong", {}, title), ...names),
      svg,
    );
  }

  /** The name of a line with its colour, and its value at the cursor. */
  nameOf(line) {
    const value = element("b");
    this.readers.push([value, line]);
    const mark = element("i", { class: line.thin ? "mark thin" : "mark" });
    mark.style.background = paint(line.colour);
    return element("span", { class: "name" }, mark, `${line.name} `, value);
  }

  canvas(height, name) {
    const svg = drawing("svg", { width: this.width, height, role: "img", "aria-label": name });
    if (!this.onPick) return svg;
    svg.classList.add("pointed");
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
    return this.bumps.map(([from, to, colour]) => {
      const width = Math.max(this.x(to) - this.x(from), 1);
      const shade = drawing("rect", { class: "bump", x: this.x(from), width, y: top, height: bottom - top });
      if (colour) {
        shade.classList.add("of-run");
        shade.style.fill = paint(colour);
      }
      return shade;
    });
  }

  cursorLine(top, bottom) {
    const line = drawing("line", { class: "cursor", y1: top, y2: bottom });
    this.cursors.push(line);
    return line;
  }

  path(d, line, kind) {
    const path = drawing("path", {
      d,
      class: [kind, line.thin && "thin", line.dashed && "dashed", line.dotted && "dotted"].filter(Boolean).join(" "),
    });
    path.style[kind === "band" ? "fill" : "stroke"] = paint(line.colour);
    return path;
  }

  dots(line, y) {
    return line.step.flatMap((step, i) => {
      if (line.value[i] == null) return [];
      const dot = drawing("circle", { cx: this.x(step), cy: y(line.value[i]), r: 1.8 });
      dot.style.fill = paint(line.colour);
      return [dot];
    });
  }

  /** Numbers at round places, a short mark at every checkpoint, and the name of the axis if it is not "step". */
  axis(bottom, name) {
    const marks = this.checkpoints.map((step) => {
      const x = this.x(step);
      return drawing("line", { class: "checkpoint", x1: x, x2: x, y1: bottom + 2, y2: bottom + 5 });
    });
    const most = Math.max(2, Math.floor(this.width / 90));
    const round = this.isLog
      ? [0, ...decades(1, this.last)].filter((step) => step >= this.first)
      : ticks(this.first, this.last, most);
    const labels = round.map((step) => {
      const far = this.x(step) > this.width - 24;
      const x = far ? this.width - 2 : this.x(step);
      const anchor = far ? "end" : "middle";
      return drawing("text", { class: "tick", x, y: bottom + 17, "text-anchor": anchor }, String(step));
    });
    if (name !== "step")
      labels.push(drawing("text", { class: "tick", x: 2, y: bottom + 17, "text-anchor": "start" }, name));
    return [...marks, ...labels];
  }
}

/** A colour: a name in the style sheet, or a colour as it is written there. */
function paint(colour) {
  return /[#(]/.test(colour) ? colour : `var(--${colour})`;
}

/** The highest and the lowest of all numbers of some lines, their bands included. */
function extent(lines) {
  let [low, high] = [Infinity, -Infinity];
  for (const line of lines) {
    for (const value of [...line.value, ...(line.low ?? []), ...(line.high ?? [])]) {
      if (value == null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return low <= high ? [low, high] : [0, 1];
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

/** Powers of ten between two values, at most four of them. */
function decades(low, high) {
  const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const every = Math.max(1, Math.ceil((to - from + 1) / 4));
  const out = [];
  for (let power = to; power >= from; power -= every) out.unshift(Number(`1e${power}`));
  return out;
}

/** A path through the points, broken where there is no number. */
function trace(steps, values, charts, y) {
  let d = "";
  let broken = true;
  steps.forEach((step, i) => {
    if (values[i] == null) broken = true;
    else {
      d += `${broken ? "M" : "L"}${charts.x(step).toFixed(1)},${y(values[i]).toFixed(1)}`;
      broken = false;
    }
  });
  return d;
}

function band({ step, low, high }, charts, y) {
  const kept = step.map((_, i) => i).filter((i) => low[i] != null && high[i] != null);
  if (kept.length < 2) return "";
  const point = (values) => (i) => `${charts.x(step[i]).toFixed(1)},${y(values[i]).toFixed(1)}`;
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

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
