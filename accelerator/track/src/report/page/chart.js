// A chart of lines on a canvas: `{title, lines: [{label, color, x: [], y: []}], xFormat, yFormat}`.

const AXIS = { left: 52, right: 12, top: 10, bottom: 24 };

// About `count` round numbers from `from` to `to`.
const ticks = (from, to, count) => {
  const rough = (to - from) / Math.max(1, count);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((x) => x * power).find((x) => x >= rough * 0.999);
  if (!Number.isFinite(step) || step <= 0) return [from];
  const list = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to + step * 1e-9 && list.length < 50; at += 1) list.push(at * step);
  return list.map((x) => (Math.abs(x) < step * 1e-9 ? 0 : Number(x.toPrecision(12))));
};
// Powers of ten from the logarithm `from` to `to`; between them 2 and 5 where there is room.
const logTicks = (from, to, count) => {
  const each = Math.max(1, Math.ceil((to - from) / count));
  const factors = (to - from) * 3 <= count + 1 ? [1, 2, 5] : [1];
  const list = [];
  for (let at = Math.floor(from); at <= to; at += 1) {
    if (at % each === 0) for (const factor of factors) list.push(Number((factor * Math.pow(10, at)).toPrecision(12)));
  }
  const inside = list.filter((x) => Math.log10(x) >= from - 1e-9 && Math.log10(x) <= to + 1e-9);
  return inside.length > 1 ? inside : ticks(Math.pow(10, from), Math.pow(10, to), count).filter((x) => x > 0);
};

// Exponential moving average, without the pull towards zero at the start. What is not finite is passed over.
const smoothed = (values, weight) => {
  if (!weight) return values;
  let mean = 0;
  let sum = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = mean * weight + value * (1 - weight);
    sum = sum * weight + (1 - weight);
    return mean / sum;
  });
};

const sortedByX = (line) => {
  let sorted = true;
  for (let at = 1; at < line.x.length && sorted; at += 1) sorted = line.x[at - 1] <= line.x[at];
  if (sorted) return line;
  const order = line.x.map((_, at) => at).sort((a, b) => line.x[a] - line.x[b]);
  return { ...line, x: order.map((at) => line.x[at]), y: order.map((at) => line.y[at]) };
};

class Chart {
  constructor(title, options = {}) {
    this.options = options;
    this.lines = [];
    this.zoom = null;
    this.view = { smooth: 0, log: false };
    this.canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": title });
    this.tip = h("div", { class: "tip", hidden: true });
    this.empty = h("p", { class: "empty", hidden: true });
    this.element = h("div", { class: "plot" }, this.canvas, this.tip, this.empty);
    this.title = title;
    this.hoverAt = null;
    this.drag = null;
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.drag) this.drag.to = at(event);
      this.hoverAt = { x: at(event), y: event.clientY - this.canvas.getBoundingClientRect().top };
      this.paint();
    });
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) this.drag = { from: at(event), to: at(event) };
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag.to - drag.from) > 8) {
        this.zoom = [this.toX(Math.min(drag.from, drag.to)), this.toX(Math.max(drag.from, drag.to))];
      }
      this.draw();
    });
    this.canvas.addEventListener("dblclick", () => {
      this.zoom = null;
      this.draw();
    });
    // Keys move along the values.
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.scale) return;
      event.preventDefault();
      const from = this.hoverAt ? this.hoverAt.x : AXIS.left;
      this.hoverAt = { x: Math.max(AXIS.left, Math.min(this.width - AXIS.right, from + by * 6)), y: this.height / 2 };
      this.paint();
    });
    this.canvas.addEventListener("blur", () => this.leave());
  }

  set(lines, label) {
    this.lines = lines.map(sortedByX);
    this.canvas.setAttribute("aria-label", label || this.title);
    this.draw();
  }

  leave() {
    this.hoverAt = this.drag = null;
    this.paint();
  }

  // Finds the scales, draws everything into a picture of its own, and shows it.
  draw() {
    const width = this.element.clientWidth;
    const height = this.element.clientHeight;
    if (!width || !height) return;
    this.width = width;
    this.height = height;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.picture = document.createElement("canvas");
    this.picture.width = this.canvas.width;
    this.picture.height = this.canvas.height;
    const g = this.picture.getContext("2d");
    g.scale(ratio, ratio);
    this.scale = this.scales();
    this.empty.hidden = !!this.scale;
    this.empty.textContent = this.lines.length ? "no values here" : this.options.emptyText || "no values";
    if (this.scale) {
      this.axes(g);
      g.save();
      g.beginPath();
      g.rect(AXIS.left - 5, 0, width - AXIS.left - AXIS.right + 10, height - AXIS.bottom + 5);
      g.clip();
      const many = this.drawn.length > 12;
      for (const line of this.drawn) {
        if (this.view.smooth) this.path(g, line, line.y, 0.22, 1);
        this.path(g, line, line.smooth, many ? 0.75 : 1, many ? 1.1 : 1.7);
        this.oddValues(g, line);
      }
      g.restore();
    }
    this.paint();
  }

  scales() {
    const { smooth, log } = this.view;
    this.drawn = this.lines.map((line) => ({ ...line, smooth: smoothed(line.y, smooth) }));
    let [left, right] = [Infinity, -Infinity];
    let [low, high] = [Infinity, -Infinity];
    for (const line of this.drawn) {
      for (let at = 0; at < line.x.length; at += 1) {
        const x = line.x[at];
        if (!Number.isFinite(x) || (this.zoom && (x < this.zoom[0] || x > this.zoom[1]))) continue;
        left = Math.min(left, x);
        right = Math.max(right, x);
        const y = smooth && this.drawn.length > 1 ? line.smooth[at] : line.y[at];
        if (!Number.isFinite(y) || (log && y <= 0)) continue;
        low = Math.min(low, y);
        high = Math.max(high, y);
      }
    }
    if (left > right) return null;
    if (this.zoom) [left, right] = this.zoom;
    if (left === right) (left -= 0.5), (right += 0.5);
    // All values may be infinite, or none positive on a logarithmic axis.
    if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
    let isLog = log;
    if (isLog) [low, high] = [Math.log10(low), Math.log10(high)];
    if (this.options.zero && !isLog) low = Math.min(0, low);
    if (high - low < 1e-12 * Math.max(1e-300, Math.abs(high), Math.abs(low)) || high === low) {
      const pad = isLog ? 0.5 : Math.abs(high) * 0.1 || 0.5;
      (low -= pad), (high += pad);
    } else {
      const pad = (high - low) * 0.06;
      if (!(this.options.zero && low === 0)) low -= pad;
      high += pad;
    }
    return { left, right, low, high, log: isLog };
  }

  px(x) {
    return AXIS.left + ((x - this.scale.left) / (this.scale.right - this.scale.left)) * (this.width - AXIS.left - AXIS.right);
  }
  toX(px) {
    return this.scale.left + ((px - AXIS.left) / (this.width - AXIS.left - AXIS.right)) * (this.scale.right - this.scale.left);
  }
  py(y) {
    const { low, high, log } = this.scale;
    const at = log ? Math.log10(y) : y;
    return this.height - AXIS.bottom - ((at - low) / (high - low)) * (this.height - AXIS.bottom - AXIS.top);
  }

  axes(g) {
    const { left, right, low, high, log } = this.scale;
    const yCount = Math.max(2, Math.floor((this.height - 40) / 38));
    // Round numbers of the unit that is shown, as GiB.
    const unit = this.options.unit ? this.options.unit(high) : 1;
    const yTicks = log ? logTicks(low, high, yCount) : ticks(low / unit, high / unit, yCount).map((y) => y * unit);
    const xTicks = ticks(left, right, Math.max(2, Math.floor((this.width - 60) / 80))).filter((x) => !this.wholeX || Number.isInteger(x));
    g.font = "11px " + style("--font");
    g.fillStyle = style("--muted");
    g.strokeStyle = style("--grid");
    g.lineWidth = 1;
    g.textAlign = "right";
    g.textBaseline = "middle";
    const yText = this.options.yFormat || ((y) => fmt(y, 4));
    for (const y of yTicks) {
      const at = Math.round(this.py(y)) + 0.5;
      g.beginPath();
      g.moveTo(AXIS.left, at);
      g.lineTo(this.width - AXIS.right, at);
      g.stroke();
      g.fillText(yText(y), AXIS.left - 6, at);
    }
    g.textAlign = "center";
    g.textBaseline = "top";
    const xText = this.xFormat || ((x) => (Math.abs(x) >= 1e4 ? compact(x) : fmt(x, 4)));
    for (const x of xTicks) {
      const word = xText(x);
      const half = g.measureText(word).width / 2;
      const at = Math.min(this.width - 2 - half, this.px(x));
      g.fillText(word, at, this.height - AXIS.bottom + 7);
    }
    g.strokeStyle = style("--axis");
    g.beginPath();
    g.moveTo(AXIS.left, this.height - AXIS.bottom + 0.5);
    g.lineTo(this.width - AXIS.right, this.height - AXIS.bottom + 0.5);
    g.stroke();
  }

  path(g, line, values, opacity, thickness) {
    g.globalAlpha = opacity;
    g.strokeStyle = g.fillStyle = line.color;
    g.lineWidth = thickness;
    g.lineJoin = "round";
    g.setLineDash(line.dash || []);
    g.beginPath();
    let run = 0;
    const good = (at) => Number.isFinite(values[at]) && Number.isFinite(line.x[at]) && (!this.scale.log || values[at] > 0);
    for (let at = 0; at < values.length; at += 1) {
      if (!good(at)) {
        run = 0;
        continue;
      }
      const [x, y] = [this.px(line.x[at]), this.py(values[at])];
      if (run) g.lineTo(x, y);
      else g.moveTo(x, y);
      run += 1;
      // A value between two gaps has no line.
      if (run === 1 && !good(at + 1)) {
        g.moveTo(x + 2.5, y);
        g.arc(x, y, 2.5, 0, 7);
        run = 0;
      }
    }
    g.stroke();
    g.setLineDash([]);
    g.globalAlpha = 1;
  }

  // Triangles at the edges for infinities, crosses for what is no number.
  oddValues(g, line) {
    g.strokeStyle = g.fillStyle = line.color;
    g.lineWidth = 1.4;
    for (let at = 0; at < line.y.length; at += 1) {
      const y = line.y[at];
      if (Number.isFinite(y)) continue;
      const x = this.px(line.x[at]);
      const bottom = this.height - AXIS.bottom;
      g.beginPath();
      if (Number.isNaN(y)) {
        g.moveTo(x - 3, bottom - 9), g.lineTo(x + 3, bottom - 3);
        g.moveTo(x - 3, bottom - 3), g.lineTo(x + 3, bottom - 9);
        g.stroke();
      } else {
        const [tip, base] = y > 0 ? [1, 8] : [bottom - 1, bottom - 8];
        g.moveTo(x, tip), g.lineTo(x - 4, base), g.lineTo(x + 4, base);
        g.fill();
      }
    }
  }

  // The picture, with what the pointer is over.
  paint() {
    if (!this.picture) return;
    const g = this.canvas.getContext("2d");
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.canvas.width, this.canvas.height);
    g.drawImage(this.picture, 0, 0);
    this.tip.hidden = true;
    if (!this.scale || !this.hoverAt) return;
    const ratio = window.devicePixelRatio || 1;
    g.scale(ratio, ratio);
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 3) {
      g.fillStyle = style("--accent");
      g.globalAlpha = 0.15;
      g.fillRect(this.drag.from, 0, this.drag.to - this.drag.from, this.height - AXIS.bottom);
      g.globalAlpha = 1;
      return;
    }
    this.hover(g);
  }

  hover(g) {
    const x = this.toX(this.hoverAt.x);
    if (x < this.scale.left || x > this.scale.right) return;
    let found = [];
    for (const line of this.drawn) {
      const at = nearest(line.x, x);
      if (at >= 0) found.push({ line, at, px: this.px(line.x[at]) });
    }
    if (!found.length) return;
    const distance = (one) => Math.abs(one.px - this.hoverAt.x);
    const closest = found.reduce((a, b) => (distance(b) < distance(a) ? b : a));
    found = found.filter((one) => distance(one) < 40 || one === closest);
    const height = ({ line, at }) => (Number.isFinite(line.smooth[at]) ? this.py(line.smooth[at]) : 0);
    const shown = found
      .sort((a, b) => Math.abs(height(a) - this.hoverAt.y) - Math.abs(height(b) - this.hoverAt.y))
      .slice(0, 10)
      .sort((a, b) => height(a) - height(b));
    g.strokeStyle = style("--axis");
    g.lineWidth = 1;
    g.beginPath();
    g.moveTo(Math.round(closest.px) + 0.5, AXIS.top - 6);
    g.lineTo(Math.round(closest.px) + 0.5, this.height - AXIS.bottom);
    g.stroke();
    for (const { line, at, px } of shown) {
      if (!Number.isFinite(line.smooth[at]) || (this.scale.log && line.smooth[at] <= 0)) continue;
      g.fillStyle = line.color;
      g.strokeStyle = style("--card");
      g.lineWidth = 1.5;
      g.beginPath();
      g.arc(px, this.py(line.smooth[at]), 4, 0, 7);
      g.fill();
      g.stroke();
    }
    const yText = this.options.yFormat || ((y) => fmt(y, 6));
    const rows = shown.map(({ line, at }) =>
      h("div", { color: line.color }, h("i", { class: "dot" }), h("b", {}, yText(line.y[at])),
        this.view.smooth ? h("span", { class: "soft" }, "≈ " + yText(line.smooth[at])) : null,
        h("span", { class: "name" }, line.label)));
    const more = found.length - shown.length;
    const xText = this.xFormat || ((value) => fmt(value, 8));
    this.tip.replaceChildren(h("div", { class: "soft" }, (this.xName ? this.xName + " " : "") + xText(closest.line.x[closest.at])), ...rows,
      more > 0 ? h("div", { class: "soft" }, `and ${more} more`) : "");
    this.tip.hidden = false;
    const left = closest.px + 14 + this.tip.offsetWidth > this.width ? closest.px - 14 - this.tip.offsetWidth : closest.px + 14;
    this.tip.style.left = Math.max(0, left) + "px";
    this.tip.style.top = "4px";
  }
}

const compact = (x) => new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 }).format(x);

// The index of the value nearest to `x` in an ordered list.
const nearest = (list, x) => {
  if (!list.length) return -1;
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(list[high] - x) < Math.abs(list[low] - x) ? high : low;
};
