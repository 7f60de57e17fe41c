// Parallel coordinates on a canvas: an axis for each parameter and the objective, a line for each trial.

const MARGIN = { left: 46, right: 60, top: 30, bottom: 14 };
const FEW = 24;

// Numbers of several decades have a logarithmic axis; what is no number has a place each.
const axisOf = (name, values) => {
  const there = values.filter((value) => value !== null && value !== undefined);
  const numbers = there.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (there.every((value) => typeof value === "number")) {
    const low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
    const high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
    const isLog = low > 0 && high / low >= 100;
    const on = isLog ? Math.log10 : (value) => value;
    const at = (value) => (typeof value !== "number" || !Number.isFinite(value) ? null : high > low ? (on(value) - on(low)) / (on(high) - on(low)) : 0.5);
    const marks = !numbers.length ? [] : high > low ? (isLog ? logTicks(on(low), on(high), 8) : ticks(low, high, 8)).filter((x) => at(x) >= -1e-9 && at(x) <= 1 + 1e-9) : [low];
    return { name, kind: isLog ? "logarithmic" : "linear", at, marks: marks.map((x) => [at(x), fmt(x, 4)]) };
  }
  const places = [...new Set(there.map(shown))].sort();
  const at = (value) => (value === null || value === undefined ? null : places.length > 1 ? places.indexOf(shown(value)) / (places.length - 1) : 0.5);
  const each = Math.ceil(places.length / FEW);
  return { name, kind: "categorical", at, marks: places.filter((_, i) => i % each === 0).map((word) => [places.length > 1 ? places.indexOf(word) / (places.length - 1) : 0.5, word.length > 14 ? word.slice(0, 13) + "…" : word]) };
};

class Parallel {
  // `lines`: `{label, color, values, words}`, what is drawn last at the end.
  constructor(title, names, lines) {
    this.lines = lines;
    this.axes = names.map((name, i) => axisOf(name, lines.map((line) => line.values[i])));
    this.canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": title });
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    this.element = h("div", { class: "plot" }, this.canvas, this.tip);
    this.chosen = null;
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.choose(this.nearest(event.clientX - box.left, event.clientY - box.top));
    });
    for (const name of ["pointerleave", "blur"]) this.canvas.addEventListener(name, () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!by || !this.lines.length) return;
      event.preventDefault();
      const last = this.lines.length - 1;
      this.choose(this.chosen === null ? last : Math.max(0, Math.min(last, this.chosen + by)));
    });
  }

  draw() {
    const [width, height] = [this.element.clientWidth, this.element.clientHeight];
    if (!width || !height) return;
    Object.assign(this, { width, height });
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "11px " + style("--font");
    this.points = this.lines.map((line) => this.axes.map((axis, i) => {
      const at = axis.at(line.values[i]);
      return at === null ? null : [this.x(i), height - MARGIN.bottom - at * (height - MARGIN.top - MARGIN.bottom)];
    }));
    const faint = this.chosen === null ? Math.max(0.15, Math.min(0.8, 60 / this.lines.length)) : 0.08;
    this.points.forEach((points, i) => this.line(g, points, this.lines[i].color, faint, 1.2));
    if (this.chosen !== null) this.line(g, this.points[this.chosen], this.lines[this.chosen].color, 1, 3);
    this.axes.forEach((axis, i) => this.axis(g, axis, i));
  }

  x(i) {
    return MARGIN.left + (this.axes.length > 1 ? i / (this.axes.length - 1) : 0.5) * (this.width - MARGIN.left - MARGIN.right);
  }

  axis(g, axis, i) {
    const [x, bottom] = [Math.round(this.x(i)) + 0.5, this.height - MARGIN.bottom];
    g.globalAlpha = 1;
    g.strokeStyle = style("--axis");
    g.lineWidth = 1;
    g.beginPath();
    g.moveTo(x, MARGIN.top);
    g.lineTo(x, bottom);
    g.stroke();
    g.fillStyle = style("--text");
    g.textBaseline = "alphabetic";
    g.textAlign = i === 0 ? "left" : i === this.axes.length - 1 ? "right" : "center";
    const room = (this.width - MARGIN.left - MARGIN.right) / Math.max(1, this.axes.length - 1) - 8;
    let name = axis.name + (axis.kind === "logarithmic" ? " (log)" : "");
    while (name.length > 3 && g.measureText(name).width > room) name = name.slice(0, -2) + "…";
    g.fillText(name, i === 0 ? 4 : i === this.axes.length - 1 ? this.width - 4 : x, 14);
    g.fillStyle = style("--muted");
    g.strokeStyle = style("--card");
    g.lineWidth = 3;
    g.textAlign = "left";
    g.textBaseline = "middle";
    for (const [at, word] of axis.marks) {
      const y = bottom - at * (bottom - MARGIN.top);
      g.strokeText(word, x + 4, y);
      g.fillText(word, x + 4, y);
    }
  }

  // What a trial has no value of, its line leaves out.
  line(g, points, hue, opacity, thickness) {
    g.globalAlpha = opacity;
    g.strokeStyle = hue;
    g.lineWidth = thickness;
    g.beginPath();
    let open = false;
    for (const point of points) {
      if (point && open) g.lineTo(...point);
      else if (point) g.moveTo(point[0] - 3, point[1]), g.lineTo(...point);
      open = !!point;
    }
    g.stroke();
  }

  nearest(x, y) {
    let [found, least] = [null, 14];
    (this.points || []).forEach((points, i) => {
      for (let at = 0; at < points.length; at += 1) {
        const [from, to] = [points[at], points[at + 1] || points[at]];
        if (!from || x < from[0] - 6 || x > to[0] + 6) continue;
        const part = to[0] > from[0] ? Math.max(0, Math.min(1, (x - from[0]) / (to[0] - from[0]))) : 0;
        const distance = Math.abs(from[1] + (to[1] - from[1]) * part - y);
        if (distance <= least) [found, least] = [i, distance];
      }
    });
    return found;
  }

  choose(i) {
    if (i === this.chosen) return;
    this.chosen = i;
    this.tip.hidden = i === null;
    this.draw();
    if (i === null) return;
    const line = this.lines[i];
    this.tip.replaceChildren(h("div", { color: line.color }, h("i", { class: "dot" }), h("b", {}, line.label)), ...line.words.map(([name, word]) => h("div", {}, h("span", { class: "soft" }, name), h("span", { class: "name" }, word))));
    const points = this.points ? this.points[i].filter((point) => point) : [];
    const left = points.length ? points[points.length - 1][0] - this.tip.offsetWidth - 90 : 0;
    this.tip.style.left = Math.max(0, left) + "px";
    this.tip.style.top = MARGIN.top + "px";
  }
}
