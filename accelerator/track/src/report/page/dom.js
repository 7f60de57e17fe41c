// Elements and words. Text only ever becomes text nodes.

const SVG = document.getElementById("svg").namespaceURI;

const fill = (element, properties, children) => {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "color") element.style.setProperty("--c", value);
    else if (name in element && typeof value !== "string" && !(element instanceof SVGElement)) element[name] = value;
    else element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
};
const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

const number = (value) => (typeof value === "number" ? value : { NaN: NaN, inf: Infinity, "-inf": -Infinity }[value]);
const odd = (value) => (Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞");

// A number to read: `digits` significant ones.
const fmt = (value, digits = 5) => {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return odd(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) {
    return Math.abs(value) < 1e9 ? value.toLocaleString("en-US") : value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  const text = value.toPrecision(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
};
const bytes = (value) => {
  if (!Number.isFinite(value)) return odd(value);
  let at = 0;
  while (Math.abs(value) >= 1024 && at < 5) (value /= 1024), (at += 1);
  return fmt(value, 3) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][at];
};
const bytesUnit = (value) => Math.pow(1024, Math.max(0, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
const percent = (value) => (Number.isFinite(value) ? fmt(value * 100, 3) + " %" : odd(value));
const duration = (ms) => {
  const total = Math.round(ms / 1000);
  if (total < 1) return ms ? ms + " ms" : "0";
  const parts = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];
  const words = [];
  let rest = total;
  for (const [size, word] of parts) {
    const count = Math.floor(rest / size);
    rest %= size;
    if (count && words.length < 2) words.push(count + word);
    else if (words.length) break;
  }
  return words.join(" ");
};
const date = (ms) => {
  const two = (x) => String(x).padStart(2, "0");
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
};
const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// Ten that differ on both backgrounds, then as many hues as there are runs.
const COLORS = ["#4f83f1", "#e8743b", "#2ba56d", "#d64f8b", "#8e63d9", "#c49a1a", "#13a4b4", "#d9534f", "#7a8a2e", "#a0694b"];
const color = (i) => (i < COLORS.length ? COLORS[i] : `hsl(${(i * 137.508) % 360} 60% 52%)`);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
