// What an entry of a matrix means in the task, in words.

/** |M_ij| over Σ_j |M_ij|: what scores of Φ are taken from. */
function rowShares({ size, values }) {
  const out = new Float32Array(values.length);
  for (let dest = 0; dest < size; dest++) {
    let mass = 0;
    for (let src = 0; src <= dest; src++) mass += Math.abs(values[dest * size + src]);
    for (let src = 0; src <= dest; src++)
      out[dest * size + src] = mass ? Math.abs(values[dest * size + src]) / mass : 0;
  }
  return { size, values: out };
}

function largest({ values }) {
  let most = 0;
  for (const value of values) if (Math.abs(value) > most) most = Math.abs(value);
  return most;
}

/** The edges of a set in an example: { dest, src } each. Python says where they lie. */
function edgesOf({ edges }, name) {
  const flat = edges[name] ?? [];
  return Array.from({ length: flat.length / 2 }, (_, i) => ({ dest: flat[2 * i], src: flat[2 * i + 1] }));
}

/** What hovering says of an entry: [kind, text] lines. */
function describe(example, { roles, edges }, answers, matrix, dest, src) {
  const place = (i) => `${roles[example.roles[i]].name} ${example.tokens[i]} at ${i}`;
  const lines = [["reads", place(dest)]];
  if (src <= dest) {
    const at = dest * matrix.size;
    let mass = 0;
    for (let j = 0; j <= dest; j++) mass += Math.abs(matrix.values[at + j]);
    const value = matrix.values[at + src];
    lines.push(["from", `← ${place(src)}`]);
    if (dest === src) lines.push(["tie", "itself"]);
    for (const name of setsWith(example, dest, src))
      lines.push(["tie", `${words(name)}: ${edges[name].words}`]);
    lines.push([
      "value",
      Number.isNaN(value)
        ? "not a finite number"
        : `${number(value)} · ${number((100 * Math.abs(value)) / (mass || 1), 2)}% of the row`,
    ]);
  }
  const label = example.labels.findIndex(([i]) => i === dest);
  if (label >= 0 && answers) {
    const [said, p] = answers[label];
    const right = example.labels[label][1];
    lines.push([
      "answer",
      `answers ${said}, ${said === right ? "right" : `should be ${right}`} (p of the right one ${number(p, 2)})`,
    ]);
  }
  return lines;
}

/** The sets of edges that an entry belongs to, by name. */
function setsWith(example, dest, src) {
  const isHere = (edge) => edge.dest === dest && edge.src === src;
  return Object.keys(example.edges).filter((name) => edgesOf(example, name).some(isHere));
}
