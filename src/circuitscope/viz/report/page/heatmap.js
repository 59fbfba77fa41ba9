// A mixing matrix as a picture: rows read (dest), columns are read (src), tokens in the colours of their roles.

const STRIP = 5;
const GAP = 4;
const RIGHT = 34;
const LABEL_EVERY = 8.5; // pixels between token labels at least
const WIDEST = 640;

class Heatmap {
  constructor(roles) {
    this.roles = roles;
    this.canvas = element("canvas", { role: "img" });
    this.cover = element("canvas", { class: "cover", "aria-hidden": "true" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.node = element("div", { class: "heatmap" }, this.canvas, this.cover, this.tip);
    this.cover.addEventListener("pointermove", (event) => this.hover(event));
    this.cover.addEventListener("pointerdown", (event) => this.hover(event));
    this.cover.addEventListener("pointerleave", () => this.leave());
  }

  /**
   * Draws a picture: { matrix, example, answers, scale: { kind, most, power }, marks, name, describe }.
   * `marks` are edges to outline, `describe(dest, src)` gives the lines of text that hovering shows.
   */
  draw(picture) {
    this.picture = picture;
    const { matrix, example, scale } = picture;
    const context = this.fit(matrix.size, example);
    context.drawImage(image(matrix, scale), this.left, this.top, this.extent, this.extent);
    context.strokeStyle = ink("faint");
    context.strokeRect(this.left - 0.5, this.top - 0.5, this.extent + 1, this.extent + 1);
    for (const { dest, src, colour } of picture.marks) this.outline(context, dest, src, colour);
    this.labels(context, example);
    this.answers(context, example, picture.answers);
    this.canvas.setAttribute("aria-label", picture.name);
    if (this.pointed) this.point(...this.pointed);
  }

  /** Sizes both canvases to the width there is; gives the context of the lower one. */
  fit(size, example) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.min(this.node.clientWidth, WIDEST);
    const context = this.canvas.getContext("2d");
    this.font = `${width < 420 ? 8 : 9}px ${ink("font")}`;
    context.font = this.font;
    const text = Math.max(...example.tokens.map((token) => context.measureText(token).width));
    this.left = Math.ceil(text) + STRIP + 2 * GAP;
    this.top = 2;
    this.extent = width - this.left - RIGHT;
    this.cell = this.extent / size;
    const height = this.top + this.extent + this.left;
    for (const canvas of [this.canvas, this.cover]) {
      const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w || canvas.height !== h) {
        canvas.width = w;
        canvas.height = h;
        canvas.style.width = `${width}px`;
        canvas.style.height = `${height}px`;
      }
      const c = canvas.getContext("2d");
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      c.clearRect(0, 0, width, height);
      c.imageSmoothingEnabled = false;
      c.font = this.font;
    }
    return context;
  }

  outline(context, dest, src, colour) {
    const size = Math.max(this.cell, 5);
    const shift = (size - this.cell) / 2 + 0.5;
    context.lineWidth = 1;
    context.strokeStyle = ink(colour);
    context.strokeRect(
      this.left + src * this.cell - shift,
      this.top + dest * this.cell - shift,
      size + 1,
      size + 1,
    );
  }

  labels(context, { tokens, roles }) {
    const shown = spaced(
      roles.map((role) => !this.roles[role].quiet),
      this.cell,
    );
    context.textBaseline = "middle";
    tokens.forEach((token, i) => {
      const role = this.roles[roles[i]];
      const middle = (i + 0.5) * this.cell;
      context.fillStyle = roleInk(role);
      const thick = Math.max(this.cell - 1, 1);
      context.fillRect(this.left - STRIP - 2, this.top + middle - thick / 2, STRIP, thick);
      context.fillRect(this.left + middle - thick / 2, this.top + this.extent + 3, thick, STRIP);
      if (!shown.has(i)) return;
      context.fillStyle = role.quiet ? ink("muted") : roleInk(role);
      context.textAlign = "right";
      context.fillText(token, this.left - STRIP - GAP - 1, this.top + middle);
      context.save();
      context.translate(this.left + middle, this.top + this.extent + STRIP + GAP + 2);
      context.rotate(-Math.PI / 2);
      context.fillText(token, 0, 0);
      context.restore();
    });
  }

  /** Beside the diagonal, in the row of every label: whether the model answers right, and how surely. */
  answers(context, { labels, tokens }, answers) {
    if (!answers) return;
    const rows = new Map(labels.map(([dest, token], i) => [dest, [token, ...answers[i]]]));
    const shown = spaced(
      tokens.map((_, i) => rows.has(i)),
      this.cell,
    );
    context.textAlign = "left";
    for (const [dest, [token, said, p]] of rows) {
      if (!shown.has(dest)) continue;
      context.fillStyle = ink(said === token ? "right" : "wrong");
      const text = `${said === token ? "✓" : "✗"} ${p == null ? "–" : Math.round(100 * p) + "%"}`;
      context.fillText(text, this.left + (dest + 1) * this.cell + 4, this.top + (dest + 0.5) * this.cell);
    }
  }

  hover(event) {
    if (!this.picture) return;
    const box = this.cover.getBoundingClientRect();
    const src = Math.floor((event.clientX - box.left - this.left) / this.cell);
    const dest = Math.floor((event.clientY - box.top - this.top) / this.cell);
    const { size } = this.picture.matrix;
    if (src < 0 || dest < 0 || src >= size || dest >= size) this.leave();
    else this.point(dest, src);
  }

  /** Marks a cell, its row and its column, and says what is there. */
  point(dest, src) {
    const { size } = this.picture.matrix;
    if (dest >= size || src >= size) {
      this.leave();
      return;
    }
    this.pointed = [dest, src];
    const context = this.clearCover();
    const [x, y] = [this.left + src * this.cell, this.top + dest * this.cell];
    context.fillStyle = ink("glass");
    context.fillRect(
      this.left - STRIP - 2,
      y,
      (src <= dest ? src : dest + 1) * this.cell + STRIP + 2,
      this.cell,
    );
    if (src <= dest) {
      context.fillRect(x, y + this.cell, this.cell, this.top + this.extent - y - this.cell + STRIP + 3);
      context.strokeStyle = ink("text");
      context.lineWidth = 1.5;
      context.strokeRect(x - 0.75, y - 0.75, this.cell + 1.5, this.cell + 1.5);
    }
    const lines = this.picture
      .describe(dest, src)
      .map(([kind, text]) => element("div", { class: kind }, text));
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    this.placeTip(x, y);
  }

  /** Right of a cell, else left of it, else below. */
  placeTip(x, y) {
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const room = this.node.clientWidth - width;
    const [right, left] = [x + this.cell + 12, x - width - 12];
    const beside = right <= room ? right : left >= 0 ? left : null;
    this.tip.style.left = `${beside ?? Math.max(0, Math.min(x, room))}px`;
    this.tip.style.top = `${beside == null ? y + this.cell + 12 : Math.max(0, y - height / 2)}px`;
  }

  leave() {
    this.pointed = null;
    this.tip.hidden = true;
    this.clearCover();
  }

  clearCover() {
    const context = this.cover.getContext("2d");
    context.clearRect(0, 0, this.cover.width, this.cover.height);
    return context;
  }
}

/** A canvas with one pixel for each entry, transparent where src > dest. */
function image({ size, values }, scale) {
  const canvas = element("canvas", { width: size, height: size });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(size, size);
  const colours = palette(scale.kind);
  const lost = [128, 128, 128];
  for (let dest = 0; dest < size; dest++) {
    for (let src = 0; src <= dest; src++) {
      const at = dest * size + src;
      const value = values[at];
      pixels.data.set(Number.isNaN(value) ? lost : colours[shade(value, scale)], 4 * at);
      pixels.data[4 * at + 3] = 255;
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Place 0..255 of a value on its colour scale; `power` below 1 lifts small values. */
function shade(value, { kind, most, power }) {
  const share = Math.min(Math.abs(value) / (most || 1), 1) ** power;
  return kind === "diverging"
    ? Math.round(127.5 + 127.5 * Math.sign(value) * share)
    : Math.round(255 * share);
}

/** Positions that get a label: all where they fit, else as many as fit of those that matter. */
function spaced(matters, cell) {
  if (cell >= LABEL_EVERY) return new Set(matters.keys());
  const shown = new Set();
  const far = (i) => [...shown].every((j) => Math.abs(i - j) * cell >= LABEL_EVERY);
  matters.forEach((does, i) => {
    if (does && far(i)) shown.add(i);
  });
  return shown;
}

/** The colour bar with its numbers. */
function legend(scale) {
  const bar = element("canvas", { class: "bar", width: 256, height: 1 });
  const context = bar.getContext("2d");
  const pixels = context.createImageData(256, 1);
  palette(scale.kind).forEach((colour, i) => pixels.data.set([...colour, 255], 4 * i));
  context.putImageData(pixels, 0, 0);
  const middle = scale.most * 0.5 ** (1 / scale.power);
  const at =
    scale.kind === "diverging" ? [-scale.most, -middle, 0, middle, scale.most] : [0, middle, scale.most];
  const numbers = element(
    "div",
    { class: "bar-numbers" },
    ...at.map((value) => element("span", {}, number(value, 2))),
  );
  return element("div", { class: "legend-bar" }, bar, numbers);
}
