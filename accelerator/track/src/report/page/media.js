// Texts, histograms, images and plots: a card a key and run, with a slider over steps.

const mediaCard = (run, media, several) => {
  const body = h("div", { class: "medium" });
  const label = h("span", { class: "soft" });
  const last = media.items.length - 1;
  const show = (at) => {
    const item = media.items[at];
    label.textContent = "step " + fmt(item.s);
    body.replaceChildren(RENDER[media.kind](media, item, at, run));
  };
  const slider = last > 0
    ? h("input", { type: "range", min: "0", max: String(last), value: String(last), "aria-label": "step of " + media.key, oninput: (event) => show(Number(event.target.value)) })
    : null;
  const few = media.of > media.items.length ? h("span", { class: "soft" }, `${media.items.length} of ${media.of} steps`) : null;
  const card = h("figure", { class: "card", color: run.color },
    h("figcaption", {}, h("b", {}, media.key), several ? h("span", { class: "run" }, h("i", { class: "dot" }), run.label) : null),
    body, h("div", { class: "steps" }, slider, label, few));
  show(last);
  return card;
};

const RENDER = {
  text: (_, item) => h("pre", { tabindex: "0" }, item.text),
  image: (media, item) =>
    item.src
      ? h("img", { src: item.src, alt: `${media.key} at step ${item.s}`, loading: "lazy", class: Math.max(item.width, item.height) <= 128 ? "small" : null })
      : h("p", { class: "empty" }, `the image of ${item.width} × ${item.height} pixels is not in the page`),
  plot: (media, item, _, run) => {
    const points = item.points.map(([x, y]) => [number(x), number(y)]);
    const chart = new Chart(`${media.key}: ${item.y} over ${item.x}`);
    chart.xName = item.x;
    later(() => chart.set([{ label: item.y, color: run.color, x: points.map((p) => p[0]), y: points.map((p) => p[1]) }]));
    watchSize(chart);
    return h("div", {}, h("div", { class: "label" }, item.y), chart.element, h("div", { class: "label x" }, item.x));
  },
  histogram: (media, _, at, run) => {
    const canvas = h("canvas", { role: "img", "aria-label": histogramWords(media, media.items[at]) });
    const box = h("div", { class: "plot" }, canvas);
    later(() => ridges(canvas, box, media, at, run.color));
    return box;
  },
};

const histogramWords = (media, item) => {
  const bins = item.bins.map((bin) => bin.map(number));
  if (!bins.length) return `${media.key}: no values`;
  const total = bins.reduce((sum, bin) => sum + bin[2], 0);
  return `${media.key} at step ${item.s}: ${fmt(total)} values from ${fmt(bins[0][0])} to ${fmt(bins[bins.length - 1][1])}`;
};

// Densities of all steps behind one another, the chosen one in front of its colour.
const ridges = (canvas, box, media, chosen, hue) => {
  const [width, height] = [box.clientWidth, box.clientHeight];
  if (!width) return;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  const items = media.items.map((item) => item.bins.map((bin) => bin.map(number)).filter((bin) => bin.every(Number.isFinite)));
  const all = items.flat();
  if (!all.length) return;
  let low = Math.min(...all.map((bin) => bin[0]));
  let high = Math.max(...all.map((bin) => bin[1]));
  if (low === high) (low -= 0.5), (high += 0.5);
  const density = ([from, to, count]) => count / Math.max(to - from, (high - low) / 1e3);
  const peak = Math.max(...all.map(density)) || 1;
  const bottom = height - AXIS.bottom;
  const depth = items.length > 1 ? (bottom - AXIS.top) * 0.55 : 0;
  const rise = bottom - AXIS.top - depth - 4;
  const x = (value) => 14 + ((value - low) / (high - low)) * (width - 28);
  g.font = "11px " + style("--font");
  g.fillStyle = style("--muted");
  g.textAlign = "center";
  g.textBaseline = "top";
  for (const tick of ticks(low, high, Math.max(2, Math.floor(width / 80)))) g.fillText(fmt(tick, 4), Math.max(20, Math.min(width - 20, x(tick))), bottom + 7);
  const one = (at) => {
    const base = bottom - depth * (1 - (items.length > 1 ? at / (items.length - 1) : 1));
    g.beginPath();
    g.moveTo(x(items[at].length ? items[at][0][0] : low), base);
    for (const bin of items[at]) {
      const y = base - (density(bin) / peak) * rise;
      g.lineTo(x(bin[0]), y);
      g.lineTo(x(bin[1]), y);
    }
    if (items[at].length) g.lineTo(x(items[at][items[at].length - 1][1]), base);
    g.globalAlpha = at === chosen ? 0.9 : 0.25;
    g.fillStyle = at === chosen ? hue : style("--muted");
    g.fill();
    g.globalAlpha = 1;
    g.strokeStyle = at === chosen ? hue : style("--card");
    g.lineWidth = 1;
    g.stroke();
  };
  items.forEach((_, at) => one(at));
  g.strokeStyle = style("--axis");
  g.beginPath();
  g.moveTo(14, bottom + 0.5);
  g.lineTo(width - 14, bottom + 0.5);
  g.stroke();
};
