// The page of a search.

const data = JSON.parse(document.getElementById("data").textContent);
const trials = data.trials.map((trial) => ({ ...trial, best: number(trial.best), last: number(trial.last), y: trial.y.map(number) }));
const known = (value) => typeof value === "number" && !Number.isNaN(value);
const parameter = (trial, i) => trial.parameters[i];
const words = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? fmt(value, 6) : shown(value));

// From the worst to the best, by rank: one value that is far off does not make the others alike.
const HEAT = [[143, 163, 191], [79, 131, 241], [142, 99, 217], [214, 79, 139], [232, 116, 59]];
const heat = (part) => {
  const at = Math.min(HEAT.length - 2, Math.floor(part * (HEAT.length - 1)));
  const rest = part * (HEAT.length - 1) - at;
  return `rgb(${HEAT[at].map((x, i) => Math.round(x + (HEAT[at + 1][i] - x) * rest)).join(" ")})`;
};
const isBetter = (a, b) => (data.mode === "max" ? a > b : a < b);
const ranked = trials.filter((trial) => known(trial.best)).sort((a, b) => (isBetter(b.best, a.best) ? -1 : isBetter(a.best, b.best) ? 1 : b.id - a.id));
for (const trial of trials) trial.color = style("--axis");
ranked.forEach((trial, i) => (trial.color = heat(ranked.length > 1 ? i / (ranked.length - 1) : 1)));
// What is best is drawn last.
const drawn = [...trials.filter((trial) => !known(trial.best)), ...ranked];

const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => target.chart.draw()));
const watched = (chart) => {
  chart.element.chart = chart;
  sizes.observe(chart.element);
  return chart.element;
};
const nav = h("nav", { "aria-label": "sections" });
const main = h("main", {});
const section = (id, title, tools, ...body) => {
  nav.append(h("a", { href: "#" + id }, title));
  main.append(h("section", { id, "aria-label": title }, h("div", { class: "heading" }, h("h2", {}, title), tools), body));
};
const check = (word, change) => h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => change(event.target.checked) }), word);

const best = trials.find((trial) => trial.id === data.best);
const tile = (name, value, more) => h("div", { class: "tile" }, h("span", { class: "soft" }, name), h("b", {}, value), more ? h("span", { class: "soft" }, more) : null);
const total = (of) => trials.reduce((sum, trial) => sum + of(trial), 0);
const states = ["RUNNING", "PAUSED", "PENDING", "TERMINATED", "ERROR"].map((state) => [state, trials.filter((trial) => trial.status === state).length]).filter(([, count]) => count);
section("summary", "Summary", null,
  h("div", { class: "tiles" },
    tile(`best ${data.metric}`, best ? fmt(best.best, 6) : "–", best ? `${best.name}, iteration ${best.best_at}; last ${words(best.last)}` : "no trial has reported a number"),
    tile("trials", `${trials.length}${data.expected === null ? "" : " of " + data.expected}`, states.map(([state, count]) => `${count} ${state}`).join(", ")),
    tile("iterations", fmt(total((trial) => trial.iterations))),
    tile("time of all trials", duration(Math.round(total((trial) => trial.seconds) * 1000))),
    tile("the search", data.ending)),
  data.scheduler.length ? h("pre", {}, data.scheduler.join("\n")) : null,
  best ? h("div", { class: "scroll" }, h("table", { class: "pairs best-config" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "best configuration"), h("th", { scope: "col" }))),
    h("tbody", {}, data.best_config.map(([path, value]) => h("tr", {}, h("th", { scope: "row" }, path), h("td", {}, shown(value))))))) : null);

const objective = `${data.metric} (best)`;
if (data.parameters.length && ranked.length) {
  const lines = drawn.map((trial) => ({
    label: trial.name,
    color: trial.color,
    values: [...data.parameters.map((_, i) => parameter(trial, i)), known(trial.best) ? trial.best : null],
    words: [["status", trial.status], [objective, words(trial.best)], ...data.parameters.map((name, i) => [name, words(parameter(trial, i))])],
  }));
  const scale = h("span", { class: "soft" }, "worst", h("i", { class: "scale" }), "best");
  scale.querySelector("i").style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(heat).join(", ")})`;
  section("parameters", "Parameters", scale, h("div", { class: "card parallel" }, watched(new Parallel(`parameters and ${objective} of ${lines.length} trials`, [...data.parameters, objective], lines))));
}

const byId = new Map(trials.map((trial) => [trial.id, trial]));
if (data.rungs.some((rung) => rung.entries.length)) {
  const chart = new Chart("rungs", {});
  // Rungs stand side by side, whatever their distances.
  chart.wholeX = true;
  chart.xName = "iteration";
  chart.xFormat = (i) => (data.rungs[i] ? fmt(data.rungs[i].time) : "");
  const line = (trial) => {
    const points = data.rungs.flatMap((rung, i) => rung.entries.filter(([id]) => id === trial.id).map(([, value]) => [i, number(value)]));
    return { label: trial.name, color: trial.color, x: points.map(([x]) => x), y: points.map(([, y]) => y) };
  };
  const cutoffs = data.rungs.map((rung, i) => [i, number(rung.cutoff)]).filter(([, y]) => known(y));
  const cutoff = { label: "cutoff", color: style("--text"), dash: [6, 4], x: cutoffs.map(([x]) => x), y: cutoffs.map(([, y]) => y) };
  requestAnimationFrame(() => chart.set([...drawn.map(line).filter((one) => one.x.length), cutoff], "values at rungs, and the cutoffs"));
  const row = (rung) => {
    const values = rung.entries.map(([, value]) => number(value)).filter(known);
    const first = values.length ? values.reduce((a, b) => (isBetter(b, a) ? b : a)) : null;
    return h("tr", {}, h("th", { scope: "row" }, fmt(rung.time)), [String(rung.entries.length), rung.cutoff === null ? "None" : words(number(rung.cutoff)), words(first)].map((cell) => h("td", {}, cell)));
  };
  section("rungs", "Rungs", h("span", { class: "soft" }, "dashed: the cutoff"), h("div", { class: "card curves" }, watched(chart)),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["iteration", "trials", "cutoff", `best ${data.metric}`].map((word) => h("th", { scope: "col" }, word)))), h("tbody", {}, data.rungs.map(row)))));
}

if (trials.some((trial) => trial.x.length)) {
  const chart = new Chart("learning curves", {});
  chart.wholeX = true;
  chart.xName = "iteration";
  const lines = drawn.filter((trial) => trial.x.length).map((trial) => ({ label: trial.name, color: trial.color, x: trial.x, y: trial.y }));
  requestAnimationFrame(() => chart.set(lines, `${data.metric} of ${lines.length} trials by iteration`));
  const log = check("log y", (isLog) => {
    chart.view = { ...chart.view, log: isLog };
    chart.draw();
  });
  section("curves", "Learning curves", log, h("div", { class: "card curves" }, h("figcaption", {}, h("b", {}, data.metric)), watched(chart)));
}

const SHOWN = 500;
const table = { by: "best", down: data.mode === "max", filter: "", all: false };
const columns = [
  { name: "trial", key: "id", value: (trial) => trial.id },
  { name: "status", value: (trial) => trial.status },
  { name: objective, key: "best", value: (trial) => trial.best },
  { name: "at iteration", value: (trial) => trial.best_at },
  { name: `${data.metric} (last)`, key: "last", value: (trial) => trial.last },
  { name: "iterations", value: (trial) => trial.iterations },
  { name: "time", value: (trial) => trial.seconds, word: (trial) => duration(Math.round(trial.seconds * 1000)) },
  ...data.parameters.map((name, i) => ({ name, key: "parameter " + i, value: (trial) => parameter(trial, i) })),
];
if (trials.some((trial) => trial.error)) columns.push({ name: "error", value: (trial) => trial.error });
const body = h("tbody", {});
const more = h("p", { class: "soft" });
// Numbers by size, before texts; what is missing comes last, whichever way.
const compared = (a, b) => {
  const isThere = (x) => x !== null && x !== undefined && !Number.isNaN(x);
  if (!isThere(a) || !isThere(b)) return isThere(b) - isThere(a);
  const order = typeof a === "number" && typeof b === "number" ? a - b : typeof a === typeof b ? (shown(a) < shown(b) ? -1 : shown(a) > shown(b) ? 1 : 0) : typeof a === "number" ? -1 : 1;
  return table.down ? -order : order;
};
const key = (column) => column.key || column.name;
const rows = () => {
  const { value } = columns.find((column) => key(column) === table.by);
  const found = trials.filter((trial) => [trial.name, trial.status, trial.error || "", ...trial.parameters.map(words)].join("\n").toLowerCase().includes(table.filter));
  found.sort((a, b) => compared(value(a), value(b)) || a.id - b.id);
  const some = table.all ? found : found.slice(0, SHOWN);
  body.replaceChildren(...some.map((trial) => h("tr", { class: trial === best ? "best" : null, color: trial.color },
    h("th", { scope: "row", title: trial.name }, h("i", { class: "dot" }), trial.name),
    columns.slice(1).map((column) => {
      if (column.name === "status") return h("td", {}, h("span", { class: "badge " + trial.status }, trial.status));
      const text = column.word ? column.word(trial) : words(column.value(trial));
      return h("td", column.name === "error" ? { class: "why", title: text } : {}, text);
    }))));
  more.replaceChildren(some.length < found.length ? h("button", { type: "button", onclick: () => { table.all = true; rows(); } }, `show all ${found.length}`) : "");
};
const heads = columns.map((column) => h("th", { scope: "col" }, h("button", { type: "button", onclick: () => {
  table.down = table.by === key(column) && !table.down;
  table.by = key(column);
  sorted();
} }, column.name)));
const sorted = () => {
  heads.forEach((head, i) => head.setAttribute("aria-sort", key(columns[i]) === table.by ? (table.down ? "descending" : "ascending") : "none"));
  rows();
};
sorted();
section("trials", "Trials", h("input", { type: "search", placeholder: "trials", "aria-label": "filter of trials, by name, status or values", oninput: (event) => {
  table.filter = event.target.value.toLowerCase();
  rows();
} }), h("div", { class: "scroll runs trials", tabindex: "0", role: "region", "aria-label": "trials" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body)), more);

document.getElementById("app").append(
  h("header", {}, h("div", {}, h("h1", {}, data.name), h("p", { class: "soft" }, `${data.mode === "max" ? "largest" : "smallest"} ${data.metric} · ${data.folder} · ${date(data.generated_ms)}`)), nav),
  h("div", { class: "columns" }, main));
requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.drawn = "yes")));
