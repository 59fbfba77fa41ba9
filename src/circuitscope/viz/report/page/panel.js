// One run: words, curves, slider, pickers, picture.

const PLAY_EVERY = 220; // milliseconds
const DIFFERENCES = 4; // told beside the name of a run
const ROWS = 18; // of a panel above its details, as the style sheet places them

class Panel {
  /**
   * `data` holds roles by number, sets of edges by name, the names of all scores, and all runs with what distinguishes
   * them. `onMove(panel)` is told when a person moves the slider, `onExample(panel)` when another example is picked,
   * `onToggle(name, isOpen)` when a part of the details is opened or closed.
   */
  constructor(run, number, data, { onMove, onExample, onToggle }) {
    this.run = run;
    this.number = number;
    this.data = data;
    this.onMove = onMove;
    this.onExample = onExample;
    this.onToggle = onToggle;
    this.store = new Store(run, number);
    this.at = run.steps.length - 1;
    this.example = 0;
    this.curves = new Curves(run, data.scores, (step) => this.move(nearest(run.steps, step)));
    this.heatmap = new Heatmap(data.roles);
    this.node = this.build();
    this.ready = run.views.length ? this.pickSource(this.firstSource()) : Promise.resolve();
    new ResizeObserver(() => this.resize()).observe(this.curves.node);
    new ResizeObserver(() => this.draw()).observe(this.heatmap.node);
  }

  build() {
    const { run } = this;
    const matrix = run.views.length
      ? this.buildMatrix()
      : element("p", { class: "matrix muted" }, "This run has no mixing matrix to show.");
    const sentences = [
      this.buildName(),
      element("p", { class: "muted heading" }, run.heading, element("br"), run.recipe),
    ];
    if (run.state) sentences.push(element("p", { class: "state" }, run.state));
    sentences.push(element("p", { class: "verdict" }, element("b", {}, run.verdict[0]), ` — ${run.verdict[1]}`));
    if (run.circuit.length)
      sentences.push(element("ul", { class: "circuit" }, ...run.circuit.map((line) => element("li", {}, line))));
    const node = element(
      "section",
      { class: "run" },
      element("div", { class: "words" }, ...sentences),
      element(
        "div",
        { class: "stage" },
        element("div", { class: "panes" }, this.curves.node, this.buildSlider(), this.curves.below, matrix),
      ),
      this.buildDetails(),
    );
    node.style.setProperty("--rows", ROWS + this.details.length);
    return node;
  }

  /** The name of the run and, beside others, its colour and what distinguishes it. */
  buildName() {
    if (this.data.runs.length < 2) return element("h2", {}, this.run.name);
    const mark = element("i", { class: "mark square" });
    mark.style.background = paint(runInk(this.number));
    const differs = this.data.differs[this.number];
    const more = differs.length > DIFFERENCES ? [`${differs.length - DIFFERENCES + 1} more`] : [];
    const told = [...differs.slice(0, more.length ? DIFFERENCES - 1 : DIFFERENCES), ...more];
    const said = element("span", { class: "differs", title: differs.join(", ") }, words(told.join(" · ")));
    return element("h2", {}, mark, this.run.name, told.length ? said : null);
  }

  buildSlider() {
    const { steps } = this.run;
    this.slider = element("input", {
      type: "range",
      min: 0,
      max: steps.length - 1,
      step: 1,
      "aria-label": "checkpoint",
    });
    this.slider.value = this.at;
    this.slider.addEventListener("input", () => this.move(Number(this.slider.value)));
    this.button = element("button", { type: "button", class: "play", "aria-label": "play" }, "▶");
    this.button.addEventListener("click", () => this.play(!this.playing));
    this.stepName = element("output", { class: "step" });
    return element(
      "div",
      { class: "slider" },
      this.slider,
      element(
        "div",
        { class: "slider-row" },
        this.button,
        this.stepName,
        element("span", { class: "muted keys" }, "← → checkpoint · ↑ ↓ head · space play"),
      ),
    );
  }

  buildMatrix() {
    const layer = picker("layer", (value) => this.pickSource([Number(value), this.factor]));
    const factor = picker("factor", (value) => this.pickSource([this.layer, value]));
    const head = picker("head", (value) => this.pickView(Number(value)));
    const rank = picker("ranked by", () => this.offerHeads());
    const example = picker("example", (value) => {
      this.setExample(Number(value));
      this.onExample(this);
    });
    const show = picker("show", () => this.draw());
    const range = picker("range", () => this.draw());
    const contrast = picker("contrast", () => this.draw());
    const mark = picker("mark edges", () => this.draw());
    this.pickers = { layer, factor, head, rank, example, show, range, contrast, mark };
    const scored = [...new Set(this.run.views.flatMap((view) => Object.keys(view.scores)))];
    offer(
      rank.select,
      scored.map((score) => [score, words(score)]),
      scored.includes(this.run.rank) ? this.run.rank : scored[0],
    );
    const sets = [...new Set(this.run.examples.flatMap(({ edges }) => Object.keys(edges)))];
    offer(
      mark.select,
      [["headline", "of the headline scores"], ...sets.map((name) => [name, words(name)]), ["none", "none"]],
      "headline",
    );
    offer(
      example.select,
      this.run.examples.map(({ name }, i) => [i, name]),
      0,
    );
    offer(
      show.select,
      [
        ["value", "value"],
        ["share", "share of the row"],
      ],
      "value",
    );
    offer(
      range.select,
      [
        ["all", "all checkpoints"],
        ["one", "this one"],
      ],
      "all",
    );
    offer(
      contrast.select,
      [
        ["1", "linear"],
        ["0.5", "square root"],
      ],
      "1",
    );
    this.title = element("h3");
    this.legend = element("div", { class: "legend" });
    return element(
      "div",
      { class: "matrix" },
      element(
        "div",
        { class: "pickers" },
        ...["layer", "factor", "head", "rank", "example"].map((name) => this.pickers[name].label),
      ),
      this.title,
      this.heatmap.node,
      this.legend,
      element(
        "div",
        { class: "pickers small" },
        ...["show", "range", "contrast", "mark"].map((name) => this.pickers[name].label),
      ),
    );
  }

  /** One part for each analysis that any of the runs has, so that the parts of several runs stand side by side. */
  buildDetails() {
    const { run } = this;
    const names = [...new Set(this.data.runs.flatMap(({ analyses }) => analyses.map(({ name }) => name)))];
    this.analyses = [];
    this.details = names.map((name) => {
      const told = run.analyses.find((analysis) => analysis.name === name);
      if (!told) return element("div");
      const analysis = new Analysis(run, told, this.onToggle);
      this.analyses.push(analysis);
      return analysis.node;
    });
    const lines = run.notes.map((line) => element("li", {}, line));
    for (const [title, content] of [
      ["Config of the run", element("pre", {}, run.config)],
      ["What is shown here, and how exactly", element("ul", {}, ...lines)],
    ]) {
      const part = element("details", { "data-name": title }, element("summary", {}, title), content);
      part.addEventListener("toggle", () => this.onToggle(title, part.open));
      this.details.push(part);
    }
    return element("div", { class: "details" }, ...this.details);
  }

  /** Opens or closes the part of the details that has this name. */
  toggle(name, isOpen) {
    for (const part of this.details) if (part.dataset.name === name) part.open = isOpen;
  }

  firstSource() {
    const { views, first } = this.run;
    return first && views.some((v) => v.layer === first[0] && v.factor === first[1])
      ? first
      : [views[0].layer, views[0].factor];
  }

  /** A layer and a factor; the factor falls back to the layer's first where it has none of that name. */
  pickSource([layer, factor]) {
    const { views } = this.run;
    const layers = [...new Set(views.map((v) => v.layer))];
    const factors = [...new Set(views.filter((v) => v.layer === layer).map((v) => v.factor))];
    const before = this.view == null ? null : views[this.view];
    this.layer = layer;
    this.factor = factors.includes(factor) ? factor : factors[0];
    offer(
      this.pickers.layer.select,
      layers.map((n) => [n, `layer ${n}`]),
      layer,
    );
    offer(
      this.pickers.factor.select,
      factors.map((name) => [name, name]),
      this.factor,
    );
    this.pickers.factor.label.hidden = factors.length < 2;
    const order = this.ranked();
    const [was, is] = [before, views[order[0]]].map((view) => view && view.entries === "shares");
    if (was !== is) this.pickers.contrast.select.value = is ? "1" : "0.5";
    return this.pickView(order.find((i) => before && views[i].head === before.head) ?? order[0]);
  }

  /** Views of the layer and factor: the mean first, then by the chosen score at the last checkpoint. */
  ranked() {
    const score = this.pickers.rank.select.value;
    const here = this.run.views
      .map((view, i) => [view, i])
      .filter(([v]) => v.layer === this.layer && v.factor === this.factor);
    const value = (view) => (view.head == null ? Infinity : (view.scores[score]?.at(-1) ?? -1));
    return here.sort(([a], [b]) => value(b) - value(a) || a.head - b.head).map(([, i]) => i);
  }

  offerHeads() {
    const { views } = this.run;
    const score = this.pickers.rank.select.value;
    const name = (view) => {
      const value = view.scores[score]?.at(-1);
      return value == null ? view.label : `${view.label} · ${words(score)} ${value.toFixed(2)}`;
    };
    offer(
      this.pickers.head.select,
      this.ranked().map((i) => [i, name(views[i])]),
      this.view,
    );
    this.pickers.head.label.firstChild.textContent = views[this.view].unit;
  }

  async pickView(view) {
    this.view = view;
    this.offerHeads();
    const { title, scores } = this.run.views[view];
    const edgesOfView = ({ score, edges }) => (scores[edges] ? edges : score); // a channel has no recall+1
    const shown = this.run.headline.filter((line) => scores[edgesOfView(line)]);
    this.curves.pick({
      name: title,
      lines: shown.map((line) => {
        return { score: line.score, step: this.run.steps, value: scores[edgesOfView(line)] };
      }),
    });
    if (!("DecompressionStream" in window)) {
      this.title.textContent = "This browser cannot open the matrices: it has no DecompressionStream.";
      return;
    }
    this.heatmap.node.setAttribute("aria-busy", "true");
    await this.store.open(view);
    if (this.view !== view) return;
    this.draw();
    this.heatmap.node.setAttribute("aria-busy", "false");
  }

  /** Another head: the next (1) or the one before (−1) in the list. */
  stepHead(by) {
    if (this.view == null) return;
    const order = this.ranked();
    const next = order[order.indexOf(this.view) + by];
    if (next != null) this.pickView(next);
  }

  setExample(example) {
    this.example = Math.min(example, this.run.examples.length - 1);
    if (this.pickers) this.pickers.example.select.value = this.example;
    this.draw();
  }

  /** A person chose a checkpoint. */
  move(at) {
    this.show(at);
    this.onMove(this);
  }

  show(at) {
    this.at = Math.max(0, Math.min(at, this.run.steps.length - 1));
    this.slider.value = this.at;
    this.draw();
    this.curves.cursor(this.run.steps[this.at]);
    for (const analysis of this.analyses) analysis.cursor(this.run.steps[this.at]);
    this.nameStep();
  }

  nameStep() {
    const step = this.run.steps[this.at];
    this.stepName.textContent = `step ${step}`;
    this.slider.setAttribute(
      "aria-valuetext",
      `step ${step}, checkpoint ${this.at + 1} of ${this.run.steps.length}`,
    );
  }

  play(on) {
    clearInterval(this.playing);
    this.playing = on ? setInterval(() => this.advance(), PLAY_EVERY) : null;
    this.button.textContent = on ? "❚❚" : "▶";
    this.button.setAttribute("aria-label", on ? "pause" : "play");
    if (on && this.at === this.run.steps.length - 1) this.move(0);
  }

  advance() {
    if (this.at + 1 < this.run.steps.length) this.move(this.at + 1);
    else this.play(false);
  }

  resize() {
    if (this.curves.node.clientWidth !== this.curves.width) this.curves.draw();
    this.nameStep();
  }

  draw() {
    if (this.view == null || !this.store.isOpen(this.view) || !this.heatmap.node.clientWidth) return;
    const view = this.run.views[this.view];
    const example = this.run.examples[this.example];
    const answers = this.run.answers[this.at][this.example];
    const raw = this.store.matrix(this.view, this.at, this.example);
    const shares = this.pickers.show.select.value === "share" && view.entries !== "shares";
    const matrix = shares ? rowShares(raw) : raw;
    const scale = this.scale(view, matrix, shares);
    const marks = this.marks(view, example);
    const name = `${view.title} at step ${this.run.steps[this.at]}`;
    const say = (dest, src) => describe(example, this.data, answers, raw, dest, src);
    this.heatmap.draw({ matrix, example, answers, scale, marks, name, describe: say });
    this.title.textContent = name;
    this.drawLegend(view, example, scale, marks, shares);
  }

  /** Shares lie between 0 and 1; Φ has a range of its own. */
  scale(view, matrix, shares) {
    const bounded = view.entries === "shares" || shares;
    const own = this.pickers.range.select.value === "one";
    const most = own ? largest(matrix) : bounded ? 1 : this.store.largestEver(this.view, this.example);
    const kind = view.signed && !shares ? "diverging" : "sequential";
    return { kind, most, power: Number(this.pickers.contrast.select.value) };
  }

  drawLegend(view, example, scale, marks, shares) {
    const isShare = view.entries === "shares";
    const what = shares
      ? "|Φ| as a share of its row"
      : isShare
        ? "share of the row"
        : view.entries === "sizes"
          ? "mean |Φ|"
          : "Φ";
    const edges = new Map(marks.map(({ name, colour }) => [name, colour]));
    const roles = [...new Set(example.roles)].map((role) => this.data.roles[role]);
    const key = JSON.stringify([what, scale, [...edges], roles, darkness.matches]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    const used = roles.map((role) => named(role.name, "square", "background", roleInk(role)));
    const outlined = [...edges].map(([name, colour]) =>
      named(words(name), "outlined", "borderColor", `var(--${colour})`),
    );
    this.legend.replaceChildren(
      element("span", { class: "name" }, what),
      legend(scale),
      ...used,
      ...outlined,
    );
    this.pickers.show.label.hidden = isShare;
  }

  /** Edges to outline: of one set, or of those that the view names. */
  marks(view, example) {
    const chosen = this.pickers.mark.select.value;
    const names = chosen === "headline" ? view.marks : chosen === "none" ? [] : [chosen];
    return names.flatMap((name) => {
      const { score } = this.data.edges[name] ?? {};
      const colour = scoreInk(this.data.scores, score);
      return edgesOf(example, name).map((edge) => ({ ...edge, name, colour }));
    });
  }
}

/** A name with its mark in a colour. */
function named(name, kind, property, colour) {
  const mark = element("i", { class: `mark ${kind}` });
  mark.style[property] = colour;
  return element("span", { class: "name" }, mark, name);
}
