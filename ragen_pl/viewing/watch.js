// CHARTS, FAMILIES and PART come from ragen_pl/metrics/shown.py; a column's interval is in its _low and _high.
const PERIOD_MS = 2000;
const COLORS = ["#2f7fd6", "#e07b1f", "#3a9a63", "#b0549f", "#c2433a", "#7a6fd0", "#8a8f2a", "#2aa0a8"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const SMOOTHING = { none: 1, "5 points": 5, "20 points": 20 };
// Half of a 95% interval of a mean in standard errors, by the number of values less one (Student's t).
const STUDENT = [NaN, 12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23];
const student = (degrees) => STUDENT[degrees] || 1.96 + 2.37 / degrees + 2.82 / degrees ** 2;
const ADVICE = [
  ["rollout/valid_actions", (value) => value < 0.5, "fewer than half of the responses have a valid action: lengthen the warm start (warm_start.steps), or show the rules (context.system_prompt)"],
  ["rollout/overlong_responses", (value) => value > 0.25, "a quarter of the responses reach their length limit: raise rollout.max_response_tokens"],
  ["rollout/truncated", (value) => value > 0.1, "a tenth of the episodes are cut: raise context.max_tokens, or set context.window"],
  ["rollout/failed_episodes", (value) => value > 0, "environments fail: see the log, and rollout.failures.min_fraction"],
  ["rollout/group_return_std", (value) => value === 0, "the members of every group have equal returns: group estimators get no signal"],
];
const AXES = { iteration: ["iteration", 1], time: ["elapsed_s", 60] };

const element = (id) => document.getElementById(id);
const given = new URLSearchParams(location.hash.slice(1));
const choice = (name, values, otherwise) => (values.includes(given.get(name)) ? given.get(name) : otherwise);
const view = {
  x: choice("x", Object.keys(AXES), "iteration"), theme: choice("theme", ["auto", "light", "dark"], "auto"),
  smoothing: choice("smoothing", Object.keys(SMOOTHING), "none"), seeds: choice("seeds", ["apart", "mean"], "apart"),
  metric: given.get("metric") || "", filter: given.get("filter") || "", sort: given.get("sort") || "",
};
let runs = [], selected = given.has("runs") ? given.getAll("runs") : null;
const curves = new Map();  // of each selected run: rows, marks, recorded
let episodes = { run: null, records: null };

// ---- data

async function ask(path, values = []) {
  const answer = await fetch(`${path}?${new URLSearchParams(values)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function update(name) {
  const known = curves.get(name) || { rows: [], drops: 0, text: "" };
  const news = await ask("/run", [["run", name], ["known", known.rows.length], ["drops", known.drops]]);
  const text = JSON.stringify(news);
  if (text === known.text && curves.has(name)) return false;
  const rows = [...known.rows.slice(0, news.start), ...news.rows];
  curves.set(name, { rows, drops: news.drops, marks: news.marks, recorded: news.recorded, references: news.references, text });
  return true;
}

async function refresh(forced = false) {
  if (document.hidden && !forced) return;
  const before = JSON.stringify(runs);
  runs = await ask("/runs");
  const names = new Set(runs.map((run) => run.name));
  if (selected === null && runs.length) {
    const chosen = runs.filter((run) => run.chosen);
    selected = (chosen.length ? chosen : runs.slice(0, 1)).map((run) => run.name);
  }
  selected = selected && selected.filter((name) => names.has(name));
  for (const name of curves.keys()) if (!selected.includes(name)) curves.delete(name);
  const changed = await Promise.all((selected || []).map(update));
  if (forced || before !== JSON.stringify(runs)) drawRuns();
  if (forced || changed.includes(true)) { drawBar(); drawHealth(); drawCharts(); drawEpisodes(); }
  if (forced) await drawDifferences();
  const running = runs.filter((run) => run.state === "running").length;
  element("status").textContent = runs.length ? `${runs.length} found, ${running} running` : "none yet; they appear here when they start";
}

async function poll(forced) {
  try {
    await refresh(forced);
  } catch (error) {
    element("status").textContent = `no answer from ragen_pl.watch (${visible(String(error.message))})`;
  }
}

// One request after the other: a later one never finds an earlier one's half-read rows.
let queue = Promise.resolve();
const ordered = (forced) => { queue = queue.then(() => poll(forced)); return queue; };

function keepView() {
  const values = [...(selected || []).map((name) => ["runs", name]), ...Object.entries(view)];
  history.replaceState(null, "", `#${new URLSearchParams(values)}`);
}

// ---- table of runs

const colorOf = (name) => COLORS[Math.max(0, selected.indexOf(name)) % COLORS.length];
const interval = (value) => value ? `${value.kind === "return" ? "return " : ""}${number(value.value)}` + ("low" in value ? ` [${number(value.low, 2)}, ${number(value.high, 2)}]` : "") : "–";
function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  return seconds < 90 ? `${Math.round(seconds)} s` : minutes < 90 ? `${minutes} min` : `${(minutes / 60).toFixed(1)} h`;
}

function choose(name, wanted) {
  selected = selected.filter((one) => one !== name);
  if (wanted) selected.push(name);
  keepView();
  ordered(true);
}

const COLUMNS = [
  ["run", (run) => run.name],
  ["validation", (run) => run.validation && run.validation.value, (run) => interval(run.validation)],
  ["training", (run) => run.training && run.training.value, (run) => interval(run.training)], ["state", (run) => run.state],
  ["iterations", (run) => run.iteration, (run) => `${run.iteration}${run.iterations && run.iterations !== "-1" ? ` of ${run.iterations}` : ""}`],
  ["alarms", (run) => run.alarms], ["seed", (run) => run.seed, null, "wide"], ["environment", (run) => run.env, null, "wide"],
  ["algorithm", (run) => run.algorithm, null, "wide"], ["model", (run) => run.model, null, "wide"],
  ["time of RL", (run) => run.elapsed_s, (run) => duration(run.elapsed_s), "wide"],
];

// Runs that the filter leaves, in the order of the chosen column. All words of the filter have to be in the line.
function shownRuns() {
  const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => [run.name, run.state, run.env, run.algorithm, run.model, `seed ${run.seed}`].join(" ").toLowerCase();
  const found = runs.filter((run) => words.every((word) => text(run).includes(word)));
  const name = view.sort.replace(/^-/, ""), column = COLUMNS.find(([head]) => head === name);
  if (!column) return found;
  const rank = (run) => column[1](run) ?? -Infinity, sign = view.sort.startsWith("-") ? -1 : 1;
  return found.sort((one, other) => sign * (rank(one) > rank(other) ? 1 : rank(one) < rank(other) ? -1 : 0));
}

function drawRuns() {
  const shown = shownRuns();
  const head = ([name, , , place]) => make("th", { class: place || "" }, make("button", { type: "button", onclick: () => {
    view.sort = view.sort === `-${name}` ? name : `-${name}`;
    keepView();
    drawRuns();
  } }, name, { [name]: " ▲", [`-${name}`]: " ▼" }[view.sort] || ""));
  const cell = (run, [name, value, text, place]) => {
    const shownText = visible(String(text ? text(run) : value(run) ?? "–"));
    if (name === "run") {
      const checked = selected.includes(run.name), key = make("i", { class: "key" });
      if (checked) key.style.background = colorOf(run.name);
      const box = make("input", { type: "checkbox", checked, onchange: (event) => choose(run.name, event.target.checked) });
      return make("td", {}, make("label", {}, box, shownText, key));
    }
    if (name === "state") return make("td", {}, make("span", { class: `badge ${{ running: "good", stopped: "bad" }[run.state] || "soft"}` }, run.state));
    return make("td", { class: [place, text ? "number" : "", name === "alarms" && run.alarms ? "bad" : ""].filter(Boolean).join(" ") }, shownText);
  };
  element("choose").textContent = `choose these ${shown.length}`;
  element("runs").replaceChildren(make("thead", {}, make("tr", {}, ...COLUMNS.map(head))),
    make("tbody", {}, ...shown.map((run) => make("tr", {}, ...COLUMNS.map((column) => cell(run, column))))));
}

// A line for each chosen run, such as the jobs of a sweep: the settings in which they differ, and success.
async function drawDifferences() {
  element("settings").hidden = selected === null || selected.length < 2;
  if (element("settings").hidden) return;
  const keys = Object.entries(await ask("/differences", selected.map((name) => ["run", name])));
  const line = new Map(runs.map((run) => [run.name, run]));
  element("differences").replaceChildren(
    make("thead", {}, make("tr", {}, ...["run", "validation", ...keys.map(([key]) => key)].map((text) => make("th", {}, visible(text))))),
    make("tbody", {}, ...selected.map((name, place) => make("tr", {},
      ...[name, interval(line.get(name).validation), ...keys.map(([, values]) => values[place])].map((text) => make("td", {}, visible(text)))))));
}

// ---- health: alarms first, then advice, then how episodes end

function drawHealth() {
  const chosen = selected || [], of = (name, text) => visible(chosen.length > 1 ? `${name}: ${text}` : text);
  const alarms = chosen.flatMap((name) => curves.get(name).marks.filter((mark) => mark.kind === "alarm").map((mark) => [mark.iteration, of(name, mark.text)]))
    .sort(([one], [other]) => other - one);
  const advice = chosen.flatMap((name) => {
    const last = curves.get(name).rows.findLast((row) => "rollout/episodes" in row) || {};
    return ADVICE.filter(([metric, holds]) => metric in last && holds(last[metric])).map(([, , text]) => of(name, text));
  });
  element("health").replaceChildren(
    make("h2", {}, "Run health"),
    ...(alarms.length ? alarms.map(([iteration, text]) => make("p", { class: "bad" }, `Alarm in iteration ${iteration}: `, text)) : [make("p", { class: "good" }, "No alarm.")]),
    ...advice.map((text) => make("p", {}, "Advice: ", text)));
  element("health").hidden = !chosen.length;
}

async function drawOutcomes(run, records) {
  const counts = await ask("/outcomes", [["run", run], ["records", records]]).catch(() => ({}));
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const parts = Object.entries(counts).map(([kind, count]) => make("span", { class: kind === "success" ? "good" : "" }, `${kind}: ${count} `));
  element("outcomes").replaceChildren(...(total ? [make("b", {}, `How the ${total} recorded episodes end `), ...parts] : []));
}

// ---- curves

const SVG = "http://www.w3.org/2000/svg", WIDTH = 420, HEIGHT = 220, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
function draw(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// About `count` round numbers from low to high, at least `least` apart.
function ticks(low, high, count, least = 0) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(least, power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999));
  const values = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}
const short = (value) => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(4)));

// Mean of each point and those before it.
function smoothed(points) {
  const size = SMOOTHING[view.smoothing];
  if (size === 1) return points;
  return points.map((point, place) => {
    const near = points.slice(Math.max(0, place - size + 1), place + 1);
    return { x: point.x, y: near.reduce((sum, one) => sum + one.y, 0) / near.length };
  });
}

function pointsOf(name, metric) {
  const [column, divisor] = AXES[view.x];
  return curves.get(name).rows.filter((row) => metric in row).map((row) => ({
    x: row[column] / divisor, iteration: row.iteration, y: row[metric], low: row[`${metric}_low`], high: row[`${metric}_high`] }));
}

// Mean over runs at each iteration that all of them have, with its 95% interval over the runs (Student's t).
function meanOf(lines) {
  const [first, ...others] = lines.map((points) => new Map(points.map((point) => [point.iteration, point])));
  return [...first.keys()].filter((iteration) => others.every((points) => points.has(iteration))).map((iteration) => {
    const values = [first, ...others].map((points) => points.get(iteration));
    const mean = (key) => values.reduce((sum, value) => sum + value[key], 0) / values.length;
    const y = mean("y"), variance = values.reduce((sum, value) => sum + (value.y - y) ** 2, 0) / (values.length - 1);
    const half = student(values.length - 1) * Math.sqrt(variance / values.length);
    return { x: mean("x"), iteration, y, low: y - half, high: y + half };
  });
}

// The chosen runs, those that differ in their seed alone together if wanted: name and runs of each.
function groupsOf() {
  if (view.seeds === "apart") return selected.map((name) => [name, [name]]);
  const keys = new Map(runs.map((run) => [run.name, run.seeds || run.name])), found = new Map();
  for (const name of selected) found.set(keys.get(name), [...(found.get(keys.get(name)) || []), name]);
  return [...found.values()].map((names) => [names.length > 1 ? `${names[0]} and ${names.length - 1} other seeds` : names[0], names]);
}

function seriesOf(lines) {
  const groups = groupsOf(), alone = groups.length === 1;
  return groups.flatMap(([label, names]) => lines.map(([metric, kind], place) => {
    const each = names.map((name) => pointsOf(name, metric)).filter((points) => points.length);
    return {
      kind, label: alone ? kind : `${label} ${lines.length > 1 ? kind : ""}`,
      color: alone ? COLORS[place % COLORS.length] : colorOf(names[0]), dash: alone ? "" : DASHES[place % DASHES.length],
      points: each.length ? smoothed(each.length > 1 ? meanOf(each) : each[0]) : [] };
  })).filter((series) => series.points.length);
}

// Success or return of the other policies of the summary, of one run.
function referencesOf(lines) {
  const metric = { "val/success": "success", "val/return": "return" }[lines[0][0]];
  const found = selected.length === 1 && metric ? curves.get(selected[0]).references : {};
  return Object.entries(found).filter(([, values]) => metric in values).map(([label, values]) => ({ label, y: values[metric] }));
}

function marksOf() {
  const [column, divisor] = AXES[view.x];
  return selected.flatMap((name) => curves.get(name).marks.map((mark) => {
    const row = curves.get(name).rows.find((one) => one.iteration >= mark.iteration);
    return row && { ...mark, x: row[column] / divisor, text: selected.length > 1 ? `${name}: ${mark.text}` : mark.text };
  })).filter(Boolean);
}

// Of any number of values: a call takes about 100,000 arguments.
const least = (values) => values.reduce((one, other) => Math.min(one, other), Infinity);
const most = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity);

function spans(series, fixed, references) {
  const xs = series.flatMap((one) => one.points.map((point) => point.x));
  const ys = series.flatMap((one) => one.points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]));
  ys.push(...references.map((one) => one.y));
  let [left, right] = [least(xs), most(xs)], [low, high] = fixed || [least(ys), most(ys)];
  if (left === right) right = left + 1;
  if (low >= 0 && low < high / 2) low = 0;  // a curve near zero shows the zero
  if (high - low < 1e-9 * Math.abs(high)) low = high;  // equal but for rounding
  const room = fixed ? 0.02 : (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { left, right, low: low === 0 && !fixed ? 0 : low - room, high: high + room };
}

function chart(title, lines, fixed) {
  const series = seriesOf(lines);
  if (!series.length) return null;
  const references = referencesOf(lines), range = spans(series, fixed, references), marks = marksOf();
  const across = (x) => LEFT + (x - range.left) / (range.right - range.left) * (WIDTH - LEFT - RIGHT);
  const down = (y) => HEIGHT - BOTTOM - (y - range.low) / (range.high - range.low) * (HEIGHT - TOP - BOTTOM);
  const place = (x, y) => `${across(x).toFixed(1)},${down(y).toFixed(1)}`;
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by ${view.x}` });
  for (const y of ticks(range.low, range.high, 4)) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: down(y), y2: down(y) }),
      draw("text", { x: LEFT - 5, y: down(y) + 4, "text-anchor": "end" }, short(y)));
  }
  for (const x of ticks(range.left, range.right, 6, view.x === "iteration" ? 1 : 0)) {
    svg.append(draw("text", { x: across(x), y: HEIGHT - 6, "text-anchor": "middle" }, short(x)));
  }
  for (const mark of marks) {
    if (mark.x < range.left || mark.x > range.right) continue;
    svg.append(draw("line", { class: mark.kind, x1: across(mark.x), x2: across(mark.x), y1: TOP, y2: HEIGHT - BOTTOM }));
  }
  // A label that would stand on the one before goes to its left.
  let column = 0, before = -Infinity;
  for (const { label, y } of [...references].sort((one, other) => one.y - other.y)) {
    column = Math.abs(down(y) - before) < 12 ? (column + 1) % 3 : 0;
    before = down(y);
    svg.append(draw("line", { class: "reference", x1: LEFT, x2: WIDTH - RIGHT, y1: down(y), y2: down(y) }),
      draw("text", { x: WIDTH - RIGHT - 110 * column, y: down(y) - 3, "text-anchor": "end" }, visible(label)));
  }
  for (const { points, color, dash } of series) {
    const banded = points.filter((point) => point.low !== undefined && point.high !== undefined);
    const outline = [...banded.map((point) => place(point.x, point.low)), ...banded.reverse().map((point) => place(point.x, point.high))];
    if (banded.length > 1) svg.append(draw("polygon", { points: outline.join(" "), fill: color, opacity: 0.16 }));
    svg.append(draw("polyline", { class: "line", points: points.map((point) => place(point.x, point.y)).join(" "), stroke: color, "stroke-dasharray": dash }));
    if (points.length < 40) for (const point of points) svg.append(draw("circle", { cx: across(point.x), cy: down(point.y), r: 2.2, fill: color }));
  }
  return framed(title, series, svg, { marks, across, range });
}

function keyOf(text, color, dash = "") {
  const line = make("i");
  line.style.borderTop = `2px ${dash ? "dashed" : "solid"} ${color}`;
  return make("span", { class: "soft" }, line, visible(text));
}

// A figure with its legend, and the values at the pointer.
function framed(title, series, svg, { marks, across, range }) {
  // Of several runs the legend has the kinds of lines; the runs' colors are above the charts.
  const alone = groupsOf().length === 1;
  const kinds = alone ? series : series.filter((one, place) => series.findIndex((other) => other.kind === one.kind) === place);
  const legend = kinds.map((one) => keyOf(one.kind, alone ? one.color : "currentColor", one.dash));
  const tip = make("div", { class: "tip", hidden: true }), cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = range.left + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (range.right - range.left);
    const nearest = (points) => points.reduce((best, point) => (Math.abs(point.x - wanted) < Math.abs(best.x - wanted) ? point : best));
    const { x } = nearest(series.flatMap((one) => one.points));
    const values = series.map((one) => [one, nearest(one.points)]).filter(([, point]) => point.x === x);
    const close = marks.filter((mark) => Math.abs(across(mark.x) - across(x)) < 4);
    tip.replaceChildren(make("b", {}, view.x === "time" ? `${short(x)} min` : `iteration ${short(x)}`),
      ...values.map(([one, point]) => make("div", {}, visible(`${one.label}: ${short(point.y)}`
        + (point.low === undefined ? "" : ` [${short(point.low)}, ${short(point.high)}]`)))),
      ...close.map((mark) => make("div", { class: mark.kind === "alarm" ? "bad" : "" }, visible(mark.text))));
    tip.hidden = false;
    const right = across(x) > WIDTH / 2;
    tip.style.left = right ? "auto" : `${across(x) / WIDTH * 100 + 4}%`;
    tip.style.right = right ? `${(1 - across(x) / WIDTH) * 100 + 4}%` : "auto";
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, across(x));
    cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  return make("figure", {}, make("figcaption", {}, make("b", {}, visible(title)), ...legend), svg, tip);
}

function drawCharts() {
  const chosen = selected || [];
  const columns = new Set(chosen.flatMap((name) => curves.get(name).rows.flatMap(Object.keys)));
  const parts = [...columns].filter((name) => name.startsWith(PART)).sort()
    .map((name) => [`Reward: ${name.slice(PART.length)}`, [[name, "training"], [name.replace("rollout/", "val/"), "validation"]]]);
  // of a mixture; returns are not in one scale
  const environments = [...columns].map((name) => /^val\/(?!(?:reward|metrics)\/)([\w-]+)\/success$/.exec(name)).filter(Boolean).map((found) => found[1]).sort();
  const apart = [
    ["Success by environment", environments.map((name) => [`val/${name}/success`, name]), [0, 1]],
    ...environments.map((name) => [`Return: ${name}`, [[`rollout/${name}/return`, "training"], [`val/${name}/return`, "validation"]]]),
  ];
  const families = FAMILIES.map(([title, prefix]) => [title, [...columns].filter((name) => name.startsWith(prefix)).sort().map((name) => [name, name.slice(prefix.length) || "of the policy"])]);
  const extra = columns.has(view.metric) ? [[view.metric, [[view.metric, view.metric]]]] : [];
  const drawn = [...extra, ...apart, ...CHARTS, ...parts, ...families].filter(([, lines]) => lines.length).map(([title, lines, fixed]) => chart(title, lines, fixed)).filter(Boolean);
  const waiting = chosen.length ? "No iteration has ended yet." : "Choose a run in the table.";
  const groups = chosen.length ? groupsOf() : [];
  element("keys").replaceChildren(...(groups.length > 1 ? groups.map(([label, names]) => keyOf(label, colorOf(names[0]))) : []));
  element("charts").replaceChildren(...(drawn.length ? drawn : [make("p", { class: "soft" }, waiting)]));
}

// ---- episodes

function drawEpisodes() {
  const available = (selected || []).filter((name) => curves.get(name).recorded.length);
  if (!available.length) { episodes = { run: null, records: null }; element("episodes").replaceChildren(); element("outcomes").replaceChildren(); return; }
  if (!available.includes(episodes.run)) episodes = { run: available[0], records: null };
  const names = curves.get(episodes.run).recorded;
  const wanted = names.includes(episodes.records) ? episodes.records : names[0];
  episodes.records = wanted;  // newer ones are offered and do not replace what is read
  const address = `/episodes?${new URLSearchParams([["run", episodes.run], ["records", wanted]])}`;
  const pick = (label, values, value, key) => make("label", {}, label, make("select", { onchange: (event) => {
    episodes = key === "run" ? { run: event.target.value, records: null } : { ...episodes, records: event.target.value };
    drawEpisodes();
  } }, ...values.map((text) => make("option", { value: text, selected: text === value }, visible(text)))));
  const bar = make("p", {}, make("b", {}, "Episodes "), pick("of ", available, episodes.run, "run"), " ", pick("in ", names, wanted, "records"), " ",
    make("a", { href: address, target: "_blank", rel: "noopener" }, "in a tab of its own"));
  // The frame is loaded again only for other records: what is read in it stays.
  drawOutcomes(episodes.run, wanted);
  const old = element("episodes").querySelector("iframe");
  if (old && old.getAttribute("src") === address) {
    old.previousElementSibling.replaceWith(bar);
  } else {
    element("episodes").replaceChildren(bar, make("iframe", { src: address, title: "Episodes" }));
  }
}

// ---- axis and colors

// Made once: what is typed stays while the table is updated.
function drawFilter() {
  const filter = make("input", { type: "search", value: view.filter, placeholder: "filter", "aria-label": "Filter of runs", oninput: () => {
    view.filter = filter.value;
    keepView();
    drawRuns();
  } });
  const all = make("button", { type: "button", id: "choose", onclick: () => {
    selected = shownRuns().map((run) => run.name);
    keepView();
    ordered(true);
  } });
  element("filter").replaceChildren(filter, all);
}

function drawBar() {
  if (element("bar").contains(document.activeElement)) return;  // an open list stays open
  const control = (name, label, values, apply) => make("label", {}, label, make("select", { onchange: (event) => {
    view[name] = event.target.value;
    keepView();
    apply();
  } }, ...values.map((value) => make("option", { value, selected: value === view[name] }, value))));
  const paint = () => { document.documentElement.style.colorScheme = { light: "light", dark: "dark" }[view.theme] || "light dark"; };
  const columns = [...curves.values()].flatMap(({ rows }) => rows.slice(-3).flatMap(Object.keys));
  const metrics = [...new Set(columns)].filter((name) => name.includes("/") && !/_(low|high)$/.test(name)).sort();
  element("bar").replaceChildren(
    control("x", "curves by", Object.keys(AXES), drawCharts), control("seeds", "seeds", ["apart", "mean"], drawCharts),
    control("smoothing", "smoothing", Object.keys(SMOOTHING), drawCharts), control("metric", "another metric", ["", ...metrics], drawCharts),
    control("theme", "colors", ["auto", "light", "dark"], paint));
  paint();
}

drawFilter();
drawBar();
ordered(true).then(() => setInterval(ordered, PERIOD_MS, false));
