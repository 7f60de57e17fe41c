// Runs and artifacts as a graph from left to right: what a run used, the run, what it made.

const BOX = { width: 170, height: 44, across: 50, down: 16 };

const lineage = (runs) => {
  const nodes = new Map();
  const edges = [];
  const node = (id, make) => {
    if (!nodes.has(id)) nodes.set(id, { id, column: 0, ...make() });
    return nodes.get(id);
  };
  for (const run of runs) {
    if (!run.artifacts.length) continue;
    const center = node("run " + run.i, () => ({ kind: "run", title: run.label, detail: run.status, color: run.color }));
    for (const artifact of run.artifacts) {
      const name = `${artifact.name}:v${artifact.version}`;
      const other = node("artifact " + name + " " + artifact.digest, () => ({ kind: "artifact", title: name, detail: artifact.digest.slice(0, 12) }));
      edges.push(artifact.role === "input" ? [other, center] : [center, other]);
    }
  }
  if (!nodes.size) return null;
  // Each stands to the right of what it comes from; a circle ends after as many rounds as there are nodes.
  for (let round = 0; round < nodes.size; round += 1) {
    let moved = false;
    for (const [from, to] of edges) {
      if (to.column <= from.column && from.column + 1 < nodes.size) (to.column = from.column + 1), (moved = true);
    }
    if (!moved) break;
  }
  // Sources stand directly before what uses them.
  for (const one of nodes.values()) {
    const uses = edges.filter(([from]) => from === one).map(([, to]) => to.column);
    const comes = edges.some(([, to]) => to === one);
    if (!comes && uses.length) one.column = Math.max(0, Math.min(...uses) - 1);
  }
  const columns = [];
  for (const one of nodes.values()) (columns[one.column] ||= []).push(one);
  const used = columns.filter((column) => column);
  const step = BOX.height + BOX.down;
  const height = Math.max(...used.map((column) => column.length)) * step + BOX.down;
  used.forEach((column, x) => {
    // Near the middle of those it comes from.
    const before = (one) => {
      const rows = edges.filter(([, to]) => to === one).map(([from]) => from.y ?? 0);
      return rows.length ? rows.reduce((a, b) => a + b, 0) / rows.length : 0;
    };
    const order = column.map((one) => [before(one), one]).sort((a, b) => a[0] - b[0]);
    order.forEach(([, one], row) => {
      one.x = BOX.down + x * (BOX.width + BOX.across);
      one.y = (height - column.length * step) / 2 + row * step + BOX.down / 2;
    });
  });
  const width = BOX.down * 2 + used.length * BOX.width + (used.length - 1) * BOX.across;
  const line = ([from, to]) => {
    const [x1, y1, x2, y2] = [from.x + BOX.width, from.y + BOX.height / 2, to.x, to.y + BOX.height / 2];
    const bend = Math.max(30, Math.abs(x2 - x1) / 2);
    return s("path", { class: "edge", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2 - 7} ${y2}`, "marker-end": "url(#arrow)" });
  };
  const cut = (text) => (text.length > 21 ? text.slice(0, 20) + "…" : text);
  const box = (one) =>
    s("g", { class: "node " + one.kind, transform: `translate(${one.x} ${one.y})`, color: one.color || null },
      s("title", {}, one.title),
      s("rect", { width: String(BOX.width), height: String(BOX.height), rx: one.kind === "run" ? "22" : "6" }),
      s("text", { x: one.kind === "run" ? "20" : "12", y: "19" }, cut(one.title)),
      s("text", { x: one.kind === "run" ? "20" : "12", y: "34", class: "soft" }, one.detail));
  const words = edges.map(([from, to]) => `${from.title} to ${to.title}`).join(", ");
  return s("svg", { class: "lineage", viewBox: `0 0 ${width} ${height}`, width: String(width), height: String(height), role: "img", "aria-label": "Lineage: " + words },
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 10 10", refX: "3", refY: "5", markerWidth: "7", markerHeight: "7", orient: "auto-start-reverse" },
      s("path", { d: "M0 0L10 5L0 10z", class: "tip" }))),
    edges.map(line), [...nodes.values()].map(box));
};
