// The page: its data, its sections, its controls.

const embedded = JSON.parse(document.getElementById("data").textContent);
const live = Boolean(embedded.board);
const state = { x: "step", log: false, smooth: 0, filter: "", runFilter: "", only: false, order: [null, false], hidden: new Set() };
const runs = new Map();
const cards = new Map();
const charts = new Set();
const MOST_DETAILS = 8;

const later = (work) => requestAnimationFrame(work);
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => target.chart && target.chart.draw()));
const watchSize = (chart) => {
  chart.element.chart = chart;
  sizes.observe(chart.element);
  charts.add(chart);
};

const take = (run) => {
  run.color = color(run.i);
  run.words = [run.label, run.name, run.folder].join("\n").toLowerCase();
  run.byKey = new Map(run.series.map((x) => [x.key, x]));
  for (const columns of Object.values(run.columns)) columns.v = columns.v.map(number);
  runs.set(run.i, run);
};
const all = () => [...runs.values()].sort((a, b) => (live ? b.created_ms - a.created_ms || a.i - b.i : a.i - b.i));
const selected = () => all().filter((run) => !state.hidden.has(run.i));

// A metric in a card: the chart, and below it the last, least and greatest value of each run.
class MetricCard {
  constructor(key) {
    this.key = key;
    this.visible = false;
    this.chart = new Chart(key, { emptyText: "…" });
    watchSize(this.chart);
    this.legend = h("div", { class: "legend" });
    const name = key.includes("/") ? [h("span", { class: "soft" }, key.slice(0, key.indexOf("/") + 1)), key.slice(key.indexOf("/") + 1)] : [key];
    this.element = h("figure", { class: "card metric" },
      h("figcaption", {}, h("b", {}, name), h("button", { type: "button", class: "icon", "aria-label": "wide or narrow: " + key, title: "wide or narrow", onclick: () => this.element.classList.toggle("wide") }, "⤢")),
      this.chart.element, this.legend);
    this.element.card = this;
    seen.observe(this.element);
  }

  refresh() {
    const list = selected().filter((run) => run.byKey.has(this.key));
    this.element.hidden = !list.length || !matches(this.key);
    if (this.element.hidden) return;
    const signature = JSON.stringify(list.map((run) => [run.i, run.label, run.byKey.get(this.key)]));
    if (signature !== this.signature) this.legend.replaceChildren(...legend(list, this.key));
    this.signature = signature;
    if (this.visible) this.draw(list);
  }

  draw(list) {
    const lines = list.map((run) => ({ label: run.label, color: run.color, x: xOf(run.columns[this.key]), y: run.columns[this.key].v }));
    this.chart.view = { smooth: state.smooth, log: state.log };
    this.chart.wholeX = state.x === "step";
    this.chart.xName = state.x === "time" ? "after" : state.x;
    this.chart.xFormat = state.x === "time" ? (x) => (x < 0 ? "" : duration(Math.round(x * 1000))) : null;
    this.chart.set(lines.filter((line) => line.x.length), `${this.key}: ` + list.slice(0, 10).map((run) => words(run, this.key)).join("; "));
    mark("first chart", lines.length);
  }
}
const xOf = (columns) => {
  if (state.x === "time") return columns.t.map((ms) => ms / 1000);
  if (state.x === "epoch") return columns.e ? columns.e.map((x) => (x === null ? NaN : x)) : [];
  return columns.s;
};
const words = (run, key) => {
  const { last, min, max } = run.byKey.get(key);
  const value = (x) => (x ? `${fmt(number(x.v))} at step ${x.s}` : "none");
  return `${run.label}: last ${value(last)}, least ${value(min)}, greatest ${value(max)}`;
};
const legend = (list, key) => {
  const several = runs.size > 1;
  const cell = (x) => h("td", { title: x ? `${String(number(x.v))} at step ${x.s}` : null }, x ? fmt(number(x.v)) : "–");
  const row = (run) => {
    const series = run.byKey.get(key);
    return h("tr", { color: run.color }, several ? h("th", { scope: "row" }, dot(), run.label) : null, cell(series.last), cell(series.min), cell(series.max), series.odd ? h("td", { class: "bad", title: "values that are infinite or no numbers" }, `${series.odd} not finite`) : null);
  };
  return [h("table", {}, h("thead", {}, h("tr", {}, several ? h("th", { scope: "col" }, "run") : null, ["last", "min", "max"].map((word) => h("th", { scope: "col" }, word)))), h("tbody", {}, list.map(row)))];
};
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.card.visible = isIntersecting;
    if (isIntersecting) target.card.refresh();
  }
}, { rootMargin: "200px" });
const matches = (key) => {
  try {
    return new RegExp(state.filter, "i").test(key);
  } catch {
    return key.toLowerCase().includes(state.filter.toLowerCase());
  }
};
// When the page first showed a line, for who measures it.
const mark = (name, lines) => {
  if (lines && !document.documentElement.dataset.firstChart) document.documentElement.dataset.firstChart = Math.round(performance.now());
};

const sections = {};
const section = (id, title, ...tools) => {
  const body = h("div", { class: "body" });
  sections[id] = { body, title, element: h("section", { id, hidden: true, "aria-label": title }, h("div", { class: "heading" }, h("h2", {}, title), tools), body) };
  return sections[id].element;
};
// Builds a section anew where what it shows has changed.
const put = (id, value, build) => {
  const it = sections[id];
  const signature = JSON.stringify(value);
  if (it.signature === signature) return;
  it.signature = signature;
  const content = [build()].flat(Infinity).filter((x) => x);
  it.element.hidden = !content.length;
  it.body.replaceChildren(...content);
  drawNavigation();
};
const drawNavigation = () =>
  nav.replaceChildren(...Object.entries(sections).filter(([, it]) => !it.element.hidden).map(([id, it]) => h("a", { href: "#" + id }, it.title)));

const choice = (name, options, chosen, set) =>
  h("span", { class: "choice", role: "radiogroup", "aria-label": name }, options.map((option) =>
    h("label", {}, h("input", { type: "radio", name, value: option, checked: option === chosen, onchange: () => set(option) }), h("span", {}, option))));

const changeView = (change) => {
  Object.assign(state, change);
  for (const card of cards.values()) card.refresh();
};
const smoothing = h("output", {}, "0");
const toolbar = h("div", { class: "toolbar" },
  choice("x axis", ["step", "epoch", "time"], state.x, (x) => {
    for (const card of cards.values()) card.chart.zoom = null;
    changeView({ x });
  }),
  h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => changeView({ log: event.target.checked }) }), "log y"),
  h("label", { class: "range" }, "smoothing", h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", oninput: (event) => {
    smoothing.textContent = event.target.value;
    changeView({ smooth: Number(event.target.value) });
  } }), smoothing),
  h("input", { type: "search", placeholder: "metrics", "aria-label": "filter of metrics, a regular expression", oninput: (event) => changeView({ filter: event.target.value }) }));

const differences = h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => {
  state.only = event.target.checked;
  update();
} }), "only differences");

const title = h("h1", {}, document.title);
const subtitle = h("p", { class: "soft" });
const nav = h("nav", { "aria-label": "sections" });
const runList = h("div", { class: "list" });
const side = h("details", { class: "side card" },
  h("summary", {}, "Runs ", h("span", { class: "soft count" })),
  h("div", { class: "toolbar" },
    h("input", { type: "search", placeholder: "runs", "aria-label": "filter of runs, by name or folder", oninput: (event) => {
      state.runFilter = event.target.value.toLowerCase();
      drawSide();
    } }),
    h("button", { type: "button", onclick: () => select(() => true) }, "all"), h("button", { type: "button", onclick: () => select(() => false) }, "none")),
  runList);
const groups = h("div", {});
const banner = h("p", { class: "failure", role: "status", hidden: true });

const listed = () => all().filter((run) => run.words.includes(state.runFilter));
const select = (isShown) => {
  for (const run of listed()) state.hidden[isShown(run) ? "delete" : "add"](run.i);
  drawSide();
  update();
};
const drawSide = () => {
  side.hidden = runs.size < 2;
  side.querySelector(".count").textContent = `${selected().length} of ${runs.size}`;
  runList.replaceChildren(...listed().map((run) => h("label", { color: run.color, title: `${run.name}, in ${run.folder}` },
    h("input", { type: "checkbox", checked: !state.hidden.has(run.i), onchange: (event) => {
      state.hidden[event.target.checked ? "delete" : "add"](run.i);
      drawSide();
      update();
    } }), dot(), h("span", { class: "name" }, run.label), badge(run.status))));
};

const drawCharts = () => {
  const keys = [...new Set(selected().flatMap((run) => run.series.map((x) => x.key)))];
  for (const key of keys) {
    if (cards.has(key)) continue;
    const kind = key.includes("/") ? key.slice(0, key.indexOf("/")) : "metrics";
    let grid = [...groups.children].find((group) => group.dataset.kind === kind);
    if (!grid) {
      grid = h("details", { open: true, class: "group" }, h("summary", {}, h("h3", {}, kind)), h("div", { class: "grid" }));
      grid.dataset.kind = kind;
      groups.append(grid);
    }
    const card = new MetricCard(key);
    cards.set(key, card);
    grid.lastChild.append(card.element);
  }
  sections.metrics.element.hidden = !cards.size;
  for (const card of cards.values()) card.refresh();
};

const systemCharts = (chosen, known) => {
  const names = [...new Set(known.flatMap((detail) => detail.system.map((x) => x.name)))].sort();
  if (!names.length) return null;
  return h("div", { class: "grid" }, names.map((name) => {
    const lines = chosen.flatMap((run, at) => known[at].system.filter((x) => x.name === name).map((x) => ({ run, ...x })));
    const ranks = new Set(lines.map((line) => line.rank)).size;
    const values = lines.flatMap((line) => line.v.map(number)).filter(Number.isFinite);
    const inBytes = /memory|bytes|rss/i.test(name) && Math.max(...values, 0) > 4096;
    const isShare = /cpu|utili[sz]ation/i.test(name) && Math.max(...values, 0) <= 1;
    const yFormat = inBytes ? bytes : isShare ? percent : null;
    const chart = new Chart(name, { yFormat, unit: inBytes ? bytesUnit : null, zero: true });
    chart.xName = "after";
    chart.xFormat = (x) => (x < 0 ? "" : duration(Math.round(x * 1000)));
    watchSize(chart);
    const label = (line) => (chosen.length > 1 ? `${line.run.label} · rank ${line.rank}` : `rank ${line.rank}`);
    const hue = (line) => (chosen.length > 1 ? line.run.color : color(line.rank));
    const show = yFormat || ((x) => fmt(x));
    later(() => chart.set(lines.map((line) => ({ label: label(line), color: hue(line), dash: chosen.length > 1 && line.rank ? [2 + line.rank * 2, 2] : null, x: line.t.map((t) => t / 1000), y: line.v.map(number) })), `${name} of ${ranks} ranks`));
    const row = (line) => {
      const finite = line.v.map(number).filter(Number.isFinite);
      const cells = finite.length ? [finite[finite.length - 1], Math.min(...finite), Math.max(...finite)].map(show) : ["–", "–", "–"];
      return h("tr", { color: hue(line) }, h("th", { scope: "row" }, dot(), label(line)), cells.map((cell) => h("td", {}, cell)));
    };
    return h("figure", { class: "card" }, h("figcaption", {}, h("b", {}, name)), chart.element,
      h("div", { class: "legend" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "last", "min", "max"].map((word) => h("th", { scope: "col" }, word)))), h("tbody", {}, lines.map(row)))));
  }));
};

// What needs more space than a line per run: shown for a few runs at a time.
const drawDetails = () => {
  const chosen = selected().slice(0, MOST_DETAILS);
  const known = chosen.map((run) => run.detail);
  const several = chosen.length > 1;
  const few = selected().length > chosen.length ? h("p", { class: "soft" }, `The first ${chosen.length} of the ${selected().length} chosen runs.`) : null;
  const ids = chosen.map((run) => [run.i, run.label]);
  put("media", [ids, known.map((x) => x.media)], () => {
    const keys = [...new Set(known.flatMap((x) => x.media.map((one) => one.kind + " " + one.key)))];
    const made = keys.flatMap((key) => chosen.flatMap((run, at) => known[at].media.filter((one) => one.kind + " " + one.key === key).map((one) => mediaCard(run, one, several))));
    return made.length ? [few, h("div", { class: "grid" }, made)] : [];
  });
  put("system", [ids, known.map((x) => x.system)], () => {
    const made = systemCharts(chosen, known);
    return made ? [few, made] : [];
  });
  put("parameters", [ids, state.only, chosen.map((run) => run.hyperparameters), known.map((x) => x.earlier)], () => {
    const any = chosen.some((run) => Object.keys(run.hyperparameters).length);
    if (!any) return [];
    return several ? [few, matrix(chosen, (run) => run.hyperparameters, state.only, "hyperparameters")] : parameters(chosen[0], known[0]);
  });
  put("details", [ids, state.only, chosen.map((run) => [run.duration_ms, run.status]), known.map((x) => [x.attempts, x.checkpoints, x.entries, x.traces])], () => {
    if (!several) return chosen.length ? runDetail(chosen[0], known[0]) : [];
    const open = new Set([...sections.details.body.querySelectorAll("details.run[open]")].map((x) => x.dataset.run));
    const provenance = new Map(chosen.map((run, at) => [run, flat((known[at].attempts.at(-1) || {}).provenance)]));
    const any = [...provenance.values()].some((x) => Object.keys(x).length);
    return [few, any ? matrix(chosen, (run) => provenance.get(run), state.only, "platforms") : null, chosen.map((run, at) => {
      const it = h("details", { class: "run card", color: run.color, open: open.has(String(run.i)) }, h("summary", {}, dot(), h("b", {}, run.label), " ", badge(run.status)), runDetail(run, known[at]));
      it.dataset.run = run.i;
      return it;
    })];
  });
  differences.hidden = !several;
};

const update = () => {
  const list = selected();
  const one = list.length === 1 ? list[0] : null;
  put("overview", [list.map(({ columns, detail, ...rest }) => rest), state.order], () => {
    if (!list.length) return h("p", { class: "empty" }, runs.size ? "No run is chosen." : live ? "No runs yet. They appear here as they start." : "No runs.");
    return one ? overviewOfOne(one) : overviewOfMany(list, state.order, (name) => {
      state.order = [name, state.order[0] === name ? !state.order[1] : false];
      update();
    });
  });
  drawCharts();
  put("artifacts", list.map((run) => [run.i, run.label, run.status, run.artifacts]), () => {
    const graph = lineage(list);
    return graph ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "lineage" }, graph) : [];
  });
  drawNavigation();
  drawDetails();
};
const warn = (text) => {
  banner.hidden = !text;
  banner.textContent = text;
};

document.getElementById("app").append(
  h("header", {}, h("div", {}, title, subtitle), nav),
  h("div", { class: "columns" }, side, h("main", {}, banner, section("overview", "Overview"), section("metrics", "Metrics", toolbar), section("media", "Media"),
    section("parameters", "Hyperparameters", differences), section("system", "System"), section("artifacts", "Artifacts"), section("details", "Runs"))));
sections.metrics.body.append(groups);
side.open = matchMedia("(min-width: 900px)").matches;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw()));

const receive = ({ runs: changed, board }) => {
  changed.forEach(take);
  const gone = [...runs.keys()].filter((i) => board && !board.ids.includes(i));
  for (const i of gone) runs.delete(i);
  if (board) subtitle.replaceChildren(h("span", { class: "live" }, "live"), ` ${runs.size} run${runs.size === 1 ? "" : "s"}`, board.reading ? `, reading ${board.reading} more` : "",
    board.refused.length ? h("span", { class: "bad", title: board.refused.join("\n") }, `, ${board.refused.length} cannot be read`) : "");
  if (!changed.length && !gone.length && sections.overview.signature) return;
  drawSide();
  update();
};

// Asks a board for what changed since its last answer. It rests longer than the answer took.
const poll = async ({ version, reading }) => {
  let next = { version, reading };
  const start = performance.now();
  if (!document.hidden) {
    try {
      const answer = await fetch(`data${location.search}&since=${version}`);
      if (!answer.ok) throw new Error(answer.status === 403 ? "This board has ended. Open the address of the new one." : await answer.text());
      const changes = await answer.json();
      receive(changes);
      next = changes.board;
      warn("");
    } catch (error) {
      warn(error instanceof TypeError ? "The board does not answer. The page keeps asking." : error.message);
    }
  }
  setTimeout(poll, next.reading ? 250 : Math.max(2000, 4 * (performance.now() - start)), next);
};

subtitle.textContent = `Report of ${date(embedded.generated_ms)}`;
receive(embedded);
if (live) setTimeout(poll, 250, embedded.board);
