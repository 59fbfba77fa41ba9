// Matrices as they are stored: one compressed text for each view, opened when it is first looked at.
// Inside: float32 scales [step, example], then 8-bit codes of the causal half [step, example, entry].

class Store {
  constructor(run, number) {
    this.run = run;
    this.number = number;
    this.halves = run.examples.map(({ tokens }) => (tokens.length * (tokens.length + 1)) / 2);
    this.starts = this.halves.map((_, i) => this.halves.slice(0, i).reduce((a, b) => a + b, 0));
    this.size = this.halves.reduce((a, b) => a + b, 0);
    this.opened = new Map();
  }

  /** Brings a view into memory. */
  async open(view) {
    if (this.opened.has(view)) return;
    const holder = document.getElementById(`matrices-${this.number}-${view}`);
    const bytes = await inflated(holder.textContent);
    const count = this.run.steps.length * this.run.examples.length;
    this.opened.set(view, {
      scales: new Float32Array(bytes.buffer, 0, count),
      codes: new Uint8Array(bytes.buffer, 4 * count),
    });
  }

  isOpen(view) {
    return this.opened.has(view);
  }

  /** { size, values [dest · size + src], largest }: a matrix of an open view, zeros where src > dest. */
  matrix(view, step, example) {
    const { signed, levels, power } = this.run.views[view];
    const { codes } = this.opened.get(view);
    const scale = this.scale(view, step, example);
    const size = this.run.examples[example].tokens.length;
    const values = new Float32Array(size * size);
    let at = step * this.size + this.starts[example];
    for (let dest = 0; dest < size; dest++) {
      for (let src = 0; src <= dest; src++) {
        const code = signed ? (codes[at++] << 24) >> 24 : codes[at++];
        const lost = code === (signed ? -128 : 255);
        values[dest * size + src] = lost ? NaN : scale * Math.sign(code) * Math.abs(code / levels) ** power;
      }
    }
    return { size, values, largest: scale };
  }

  scale(view, step, example) {
    return this.opened.get(view).scales[step * this.run.examples.length + example];
  }

  /** The largest entry of an example over all checkpoints. */
  largestEver(view, example) {
    let most = 0;
    for (let step = 0; step < this.run.steps.length; step++)
      most = Math.max(most, this.scale(view, step, example));
    return most;
  }
}

async function inflated(base64) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(base64) : fromBase64(base64);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
