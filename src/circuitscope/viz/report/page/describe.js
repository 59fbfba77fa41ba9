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

/** The edges that recall needs: value ← its key, query ← the value it asks for, or a position after that value. */
function recallEdges({ pairs, queries, tokens }, { binding = 0, recall = 0 }) {
  const after = (n) => (n ? `${n} after ` : "");
  const out = pairs.map(([key, value]) => ({
    dest: value + binding,
    src: key,
    colour: "role-key",
    name: `${after(binding)}value ← its key`,
  }));
  for (const [query, pair] of queries) {
    out.push({
      dest: query,
      src: pairs[pair][1] + recall,
      colour: "role-query",
      name: `query ← ${after(recall)}its value`,
    });
  }
  return out.filter(({ dest, src }) => dest < tokens.length && src <= dest);
}

/** What hovering says of an entry: [kind, text] lines. */
function describe(example, roles, answers, matrix, dest, src) {
  const place = (i) => `${roles[example.roles[i]]} ${example.tokens[i]} at ${i}`;
  const lines = [["reads", place(dest)]];
  if (src <= dest) {
    const at = dest * matrix.size;
    let mass = 0;
    for (let j = 0; j <= dest; j++) mass += Math.abs(matrix.values[at + j]);
    const value = matrix.values[at + src];
    lines.push(["from", `← ${place(src)}`]);
    const tie = relation(example, dest, src);
    if (tie) lines.push(["tie", tie]);
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

/** How src stands to dest in the task. */
function relation({ pairs, queries, period }, dest, src) {
  if (dest === src) return "itself";
  const query = queries.find(([at]) => at === dest);
  if (query) {
    const after = src - pairs[query[1]][1];
    if (after === 0) return "the value it asks for: recall";
    if (after > 0 && after <= 3) return `${after} after the value it asks for`;
    if (src === pairs[query[1]][0]) return "its key in the context";
    if (pairs.some(([, value]) => value === src)) return "another value";
  }
  if (pairs.some(([key, value]) => value === dest && key === src)) return "its key: binding";
  if (period && src > 1 && (dest - src + 1) % period === 0) return "after an earlier occurrence: induction";
  if (period && src > 0 && (dest - src) % period === 0) return "an earlier occurrence";
  return dest - src === 1 ? "the position before" : "";
}
