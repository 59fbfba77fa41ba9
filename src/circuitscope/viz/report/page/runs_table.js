// The table of the runs: results, what differs in their configs, and which of them are shown side by side.

class RunsTable {
  /** `onChoose(numbers)` is told which runs are to be shown, `onLight(number)` which run is pointed at (or null). */
  constructor(runs, columns, chosen, { onChoose, onLight }) {
    this.runs = runs;
    this.columns = [
      { name: "run", about: "check the runs to show side by side", cells: runs.map(({ name }) => [name, null]) },
      ...columns,
    ];
    this.onChoose = onChoose;
    this.onLight = onLight;
    this.boxes = runs.map((run, i) => {
      const box = element("input", { type: "checkbox", "aria-label": `show ${run.name}` });
      box.checked = chosen.includes(i);
      box.addEventListener("change", () => this.choose(box));
      return box;
    });
    this.rows = runs.map((_, i) => this.row(i));
    this.body = element("tbody", {}, ...this.rows);
    this.heads = this.columns.map((column, i) => this.head(column, i));
    const head = element("thead", {}, element("tr", {}, ...this.heads));
    this.node = element("div", { class: "table runs-table" }, element("table", {}, head, this.body));
  }

  head({ name, about }, i) {
    const button = element("button", { type: "button", title: about }, words(name));
    button.addEventListener("click", () => this.sort(i));
    return element("th", { scope: "col" }, button);
  }

  row(i) {
    const mark = element("i", { class: "mark square" });
    mark.style.background = paint(runInk(i));
    const [name, ...rest] = this.columns.map(({ cells }) => cells[i]);
    const cells = rest.map(([text, value]) => element("td", { class: value == null ? null : "number" }, text));
    const label = element("label", {}, this.boxes[i], mark, name[0]);
    const row = element("tr", {}, element("th", { scope: "row" }, label), ...cells);
    row.addEventListener("pointerenter", () => this.onLight(i));
    row.addEventListener("pointerleave", () => this.onLight(null));
    return row;
  }

  /** At least one run stays. */
  choose(box) {
    if (!this.boxes.some(({ checked }) => checked)) box.checked = true;
    this.onChoose(this.boxes.flatMap(({ checked }, i) => (checked ? [i] : [])));
  }

  /** Sorts by a column; again, the other way round. Rows without a number come last in a column of numbers. */
  sort(column) {
    const head = this.heads[column];
    const isDown = head.getAttribute("aria-sort") === "ascending";
    this.heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const { cells } = this.columns[column];
    const numeric = cells.some(([, value]) => value != null);
    const compare = (a, b) => {
      const [[one, x], [other, y]] = [cells[a], cells[b]];
      if (!numeric) return one.localeCompare(other, undefined, { numeric: true }) * (isDown ? -1 : 1);
      if (x == null || y == null) return (x == null) - (y == null);
      return (x - y) * (isDown ? -1 : 1);
    };
    const order = this.runs.map((_, i) => i).sort(compare);
    this.body.replaceChildren(...order.map((i) => this.rows[i]));
  }
}
