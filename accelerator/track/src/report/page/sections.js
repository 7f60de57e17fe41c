// What a page says in tables, lists and trees.

const badge = (status) => h("span", { class: "badge " + status }, status);
const dot = () => h("i", { class: "dot" });

// A value of JSON as a tree; maps and lists of more than a few lines fold.
const tree = (value) => {
  if (value === null || typeof value !== "object") return leaf(value);
  const entries = Object.entries(value);
  if (!entries.length) return h("code", { class: "soft" }, Array.isArray(value) ? "[]" : "{}");
  if (Array.isArray(value) && entries.every(([, x]) => x === null || typeof x !== "object")) return h("code", {}, value.map(shown).join(" "));
  return h("dl", { class: "tree" }, entries.map(([key, x]) => [h("dt", {}, key), h("dd", {}, foldable(x))]));
};
const leaf = (value) => {
  const text = shown(value);
  return text.includes("\n") || text.length > 200 ? h("details", {}, h("summary", {}, text.split("\n")[0].slice(0, 80) + " …"), h("pre", { tabindex: "0" }, text)) : h("code", {}, text);
};
const size = (value) => (value && typeof value === "object" ? Object.values(value).reduce((sum, x) => sum + size(x), 0) : 1);
const foldable = (value) => (size(value) > 12 ? h("details", {}, h("summary", {}, `${Object.keys(value).length} entries`), tree(value)) : tree(value));

const flat = (value, prefix = "", into = {}) => {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, x] of Object.entries(value)) flat(x, prefix ? prefix + "." + key : key, into);
  } else if (prefix) into[prefix] = value;
  return into;
};

const KNOWN = ["command", "arguments", "launched_by", "directory", "commit", "features", "binary", "lock_file", "host", "devices", "world", "seeds", "data", "plan", "environment"];

const platform = (provenance) => {
  if (provenance === null || typeof provenance !== "object") return null;
  const keys = Object.keys(provenance);
  const order = [...KNOWN.filter((key) => keys.includes(key)), ...keys.filter((key) => !KNOWN.includes(key))];
  const filled = order.filter((key) => size(provenance[key]) && provenance[key] !== null);
  if (!filled.length) return null;
  return h("dl", { class: "tree top" }, filled.map((key) => {
    const value = provenance[key];
    const isCommand = (key === "command" || key === "arguments" || key === "launched_by") && Array.isArray(value);
    return [h("dt", {}, key), h("dd", {}, isCommand ? h("code", {}, value.map(quoted).join(" ")) : foldable(value))];
  }));
};
const quoted = (word) => (typeof word === "string" && /^[\w@%+=:,.\/-]+$/.test(word) ? word : "'" + String(shown(word)).replaceAll("'", "'\\''") + "'");

// Rows of keys, columns of runs; what differs is marked, and may be all that is shown.
const matrix = (runs, valuesOf, only, label) => {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(valuesOf(run))))].sort();
  const rows = keys.map((key) => {
    const cells = runs.map((run) => (key in valuesOf(run) ? shown(valuesOf(run)[key]) : null));
    return { key, cells, differs: new Set(cells).size > 1 };
  });
  const kept = rows.filter((row) => row.differs || !only);
  if (!kept.length) return h("p", { class: "empty" }, only && rows.length ? "Nothing differs." : "None.");
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), runs.map((run) => h("th", { scope: "col", color: run.color }, dot(), run.label)))),
    h("tbody", {}, kept.map((row) => h("tr", { class: row.differs ? "differs" : null },
      h("th", { scope: "row" }, row.key), row.cells.map((cell) => h("td", {}, cell === null ? h("span", { class: "soft" }, "–") : leaf(cell))))))));
};

const parameters = (run, detail) => {
  const keys = Object.keys(run.hyperparameters);
  if (!keys.length) return null;
  return h("div", { class: "scroll" }, h("table", { class: "pairs" }, h("tbody", {}, keys.map((key) => {
    const earlier = detail && detail.earlier[key];
    return h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, leaf(run.hyperparameters[key]),
      earlier ? h("span", { class: "soft" }, " was " + earlier.map(shown).join(", ")) : null));
  }))));
};

const tile = (label, value, title) => h("div", { class: "tile", title }, h("span", { class: "soft" }, label), h("b", {}, value));

const failure = (run) => {
  if (run.failure === null || run.failure === undefined) return null;
  const word = typeof run.failure === "string" ? run.failure : run.failure.message || run.failure.error;
  return h("div", { class: "failure", role: "alert" }, h("b", {}, `${run.label} ${run.status}`),
    word ? h("pre", { tabindex: "0" }, shown(word)) : null,
    typeof run.failure === "object" ? h("details", { open: !word }, h("summary", {}, "all that is known"), tree(run.failure)) : null);
};

const overviewOfOne = (run) => [
  failure(run),
  h("div", { class: "tiles" }, tile("status", badge(run.status)), tile("created", date(run.created_ms)), tile("duration", duration(run.duration_ms)),
    tile("last step", run.last_step === null ? "–" : fmt(run.last_step)), tile("ranks", String(run.world)), tile("attempts", String(run.attempts)), tile("metrics", String(run.series.length))),
  Object.keys(run.tags).length ? h("p", { class: "tags" }, Object.entries(run.tags).map(([key, value]) => h("span", { class: "tag" }, h("span", { class: "soft" }, key), " ", value))) : null,
  h("p", { class: "soft id" }, "run ", h("code", {}, run.id), " in ", h("code", {}, run.folder)),
];

// A table of runs that is sorted by a click on a column's head.
const overviewOfMany = (runs, order, sorted) => {
  const differing = [...new Set(runs.flatMap((run) => Object.keys(run.hyperparameters)))]
    .filter((key) => new Set(runs.map((run) => shown(run.hyperparameters[key] ?? null))).size > 1).slice(0, 12);
  const metrics = [...new Set(runs.flatMap((run) => run.series.map((x) => x.key)))].slice(0, 12);
  const columns = [
    ["run", (run) => run.label], ["status", (run) => run.status], ["created", (run) => run.created_ms, date], ["duration", (run) => run.duration_ms, duration],
    ["step", (run) => run.last_step, fmt],
    ...metrics.map((key) => [key, (run) => (run.byKey.has(key) && run.byKey.get(key).last ? number(run.byKey.get(key).last.v) : null), fmt]),
    ...differing.map((key) => [key, (run) => run.hyperparameters[key] ?? null, shown]),
  ];
  const [by, down] = order;
  const column = columns.find(([name]) => name === by);
  const before = (a, b) => (a === b ? 0 : a === null || Number.isNaN(a) ? 1 : b === null || Number.isNaN(b) ? -1 : (a < b ? -1 : 1) * (down ? -1 : 1));
  const list = column ? [...runs].sort((a, b) => before(column[1](a), column[1](b))) : runs;
  return [runs.filter((run) => run.failure !== null).slice(0, 5).map(failure), h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "runs" }, h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, columns.map(([name], at) => h("th", { scope: "col", class: at >= 5 + metrics.length ? "given" : null, "aria-sort": name === by ? (down ? "descending" : "ascending") : null },
      h("button", { type: "button", onclick: () => sorted(name) }, name, name === by ? (down ? " ↓" : " ↑") : ""))))),
    h("tbody", {}, list.map((run) => h("tr", { color: run.color }, columns.map(([name, of, show]) => {
      if (name === "run") return h("th", { scope: "row" }, dot(), run.label);
      if (name === "status") return h("td", {}, badge(run.status));
      const value = of(run);
      return h("td", {}, value === null ? h("span", { class: "soft" }, "–") : show(value));
    }))))))];
};

// Restarts on a line of time, and where each resumed.
const attempts = (run, detail) => {
  if (!detail.attempts.length) return null;
  return h("ol", { class: "attempts" }, detail.attempts.map((attempt, at) => {
    const next = detail.attempts[at + 1];
    const resumed = attempt.resumed.length ? (attempt.resumed[0] === null ? "started over" : `resumed from step ${fmt(attempt.resumed[0])}`) : at ? "went on" : "started";
    const end = next ? next.started_ms : run.created_ms + run.duration_ms;
    return h("li", {}, h("b", {}, `attempt ${attempt.attempt}`), h("span", {}, resumed), h("span", { class: "soft" }, `${date(attempt.started_ms)}, ${attempt.world} rank${attempt.world === 1 ? "" : "s"}, ${duration(Math.max(0, end - attempt.started_ms))}`));
  }));
};

// A page of a server may not link to files.
const fileAddress = (path) => "file://" + encodeURI(path).replaceAll("#", "%23").replaceAll("?", "%3F");

const runDetail = (run, detail) => {
  const last = detail.attempts[detail.attempts.length - 1];
  const block = (title, content) => (content ? h("div", { class: "block" }, h("h3", {}, title), content) : null);
  const saved = detail.checkpoints.filter((step) => step !== null);
  return [
    block("Attempts", attempts(run, detail)),
    block("Checkpoints", saved.length ? h("p", {}, `${saved.length}, the last at step ${fmt(saved[saved.length - 1])}`) : null),
    block("Timeline", detail.traces.length ? h("ul", { class: "plain" }, detail.traces.map((trace) => h("li", {}, live ? h("b", {}, trace.name) : h("a", { href: fileAddress(trace.path), download: trace.name }, trace.name), h("span", { class: "soft" }, " " + trace.path + " (for Perfetto)")))) : null),
    block("Platform", last ? platform(last.provenance) : null),
    block("Journal", h("p", {}, `${fmt(detail.entries)} entries in `, h("code", {}, detail.path), detail.lost_entries ? h("b", { class: "bad" }, ` ${fmt(detail.lost_entries)} entries were lost`) : null)),
  ];
};
