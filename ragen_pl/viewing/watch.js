const PERIOD_MS = 2000;
const COLORS = ["#2f7fd6", "#e07b1f", "#3a9a63", "#b0549f", "#c2433a", "#7a6fd0", "#8a8f2a", "#2aa0a8"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
// Title, lines (column and label), and the axis if it is fixed. A column's interval is in its _low and _high.
const CHARTS = [
  ["Success", [["val/success", "validation"], ["rollout/success", "training"]], [0, 1]],
  ["Return", [["val/return", "validation"], ["rollout/return", "training"]]],
  ["Entropy, nats per token", [["rollout/entropy", "training"]]],
  ["KL, nats per token", [["update/approx_kl", "of the update"], ["update/reference_kl", "to the reference"]]],
  ["Clipped fraction of tokens", [["update/clip_fraction", "update"]]],
  ["Valid actions", [["val/valid_actions", "validation"], ["rollout/valid_actions", "training"]], [0, 1]],
  ["Turns", [["val/turns", "validation"], ["rollout/turns", "training"]]],
  ["Tokens of a response", [["val/response_tokens", "validation"], ["rollout/response_tokens", "training"]]],
  ["Failed episodes", [["val/failed_episodes", "validation"], ["rollout/failed_episodes", "training"]]],
  ["Seconds by phase", ["rollout", "update", "validation", "other"].map((phase) => [`time/${phase}_s`, phase])],
];
const PART = "rollout/reward/";
const AXES = { iteration: ["iteration", 1], time: ["elapsed_s", 60] };

const element = (id) => document.getElementById(id);
const given = new URLSearchParams(location.hash.slice(1));
const view = { x: given.get("x") in AXES ? given.get("x") : "iteration", theme: given.get("theme") || "auto" };
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
  const known = curves.get(name) || { rows: [], marks: [], recorded: [], text: "" };
  const news = await ask("/run", [["run", name], ["known", known.rows.length]]);
  const text = JSON.stringify(news);
  if (text === known.text && curves.has(name)) return false;
  const rows = [...known.rows.slice(0, news.start), ...news.rows];
  curves.set(name, { rows, marks: news.marks, recorded: news.recorded, text });
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
  if (forced || changed.includes(true)) { drawCharts(); drawEpisodes(); }
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
const interval = (value) => value ? `${number(value.value)}` + ("low" in value ? ` [${number(value.low, 2)}, ${number(value.high, 2)}]` : "") : "–";
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

function drawRuns() {
  const heads = ["run", "state", "environment", "algorithm", "model", "seed", "iterations", "validation", "training", "time of RL"];
  const rows = runs.map((run) => {
    const checked = selected.includes(run.name);
    const box = make("input", { type: "checkbox", checked, onchange: (event) => choose(run.name, event.target.checked) });
    const key = make("i", { class: "key" });
    if (checked) key.style.background = colorOf(run.name);
    const state = { running: "good", stopped: "bad" }[run.state] || "soft";
    const last = run.iterations && run.iterations !== "-1" ? ` of ${run.iterations}` : "";
    const cells = [run.env, run.algorithm, run.model, run.seed].map((text) => make("td", {}, visible(String(text))));
    const numbers = [`${run.iteration}${last}`, interval(run.validation), interval(run.training), duration(run.elapsed_s)];
    return make("tr", {},
      make("td", {}, make("label", {}, box, visible(run.name), key)),
      make("td", {}, make("span", { class: `badge ${state}` }, run.state)), ...cells,
      ...numbers.map((text) => make("td", { class: "number" }, visible(text))));
  });
  element("runs").replaceChildren(
    make("thead", {}, make("tr", {}, ...heads.map((head, place) => make("th", { class: place > 5 ? "number" : "" }, head)))),
    make("tbody", {}, ...rows));
}

async function drawDifferences() {
  element("settings").hidden = selected === null || selected.length < 2;
  if (element("settings").hidden) return;
  const keys = await ask("/differences", selected.map((name) => ["run", name]));
  element("differences").replaceChildren(
    make("thead", {}, make("tr", {}, make("th", {}, "setting"), ...selected.map((name) => make("th", {}, visible(name))))),
    make("tbody", {}, ...Object.entries(keys).map(([key, values]) =>
      make("tr", {}, ...[key, ...values].map((text) => make("td", {}, visible(text)))))));
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

function seriesOf(lines) {
  const alone = selected.length === 1, [column, divisor] = AXES[view.x];
  return selected.flatMap((name) => lines.map(([metric, label], place) => ({
    kind: label, label: alone ? label : `${name} ${lines.length > 1 ? label : ""}`,
    color: alone ? COLORS[place % COLORS.length] : colorOf(name), dash: alone ? "" : DASHES[place % DASHES.length],
    points: curves.get(name).rows.filter((row) => metric in row).map((row) => ({
      x: row[column] / divisor, y: row[metric], low: row[`${metric}_low`], high: row[`${metric}_high`] })),
  }))).filter((series) => series.points.length);
}

function marksOf() {
  const [column, divisor] = AXES[view.x];
  return selected.flatMap((name) => curves.get(name).marks.map((mark) => {
    const row = curves.get(name).rows.find((one) => one.iteration >= mark.iteration);
    return row && { ...mark, x: row[column] / divisor, text: selected.length > 1 ? `${name}: ${mark.text}` : mark.text };
  })).filter(Boolean);
}

function spans(series, fixed) {
  const xs = series.flatMap((one) => one.points.map((point) => point.x));
  const ys = series.flatMap((one) => one.points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]));
  let [left, right] = [Math.min(...xs), Math.max(...xs)], [low, high] = fixed || [Math.min(...ys), Math.max(...ys)];
  if (left === right) right = left + 1;
  if (low >= 0 && low < high / 2) low = 0;  // a curve near zero shows the zero
  const room = fixed ? 0.02 : (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { left, right, low: low === 0 && !fixed ? 0 : low - room, high: high + room };
}

function chart(title, lines, fixed) {
  const series = seriesOf(lines);
  if (!series.length) return null;
  const range = spans(series, fixed), marks = marksOf();
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
  const alone = selected.length === 1;
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
  const drawn = [...CHARTS, ...parts].map(([title, lines, fixed]) => chart(title, lines, fixed)).filter(Boolean);
  const waiting = chosen.length ? "No iteration has ended yet." : "Choose a run in the table.";
  element("keys").replaceChildren(...(chosen.length > 1 ? chosen.map((name) => keyOf(name, colorOf(name))) : []));
  element("charts").replaceChildren(...(drawn.length ? drawn : [make("p", { class: "soft" }, waiting)]));
}

// ---- episodes

function drawEpisodes() {
  const available = (selected || []).filter((name) => curves.get(name).recorded.length);
  if (!available.length) { episodes = { run: null, records: null }; element("episodes").replaceChildren(); return; }
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
  const old = element("episodes").querySelector("iframe");
  if (old && old.getAttribute("src") === address) {
    old.previousElementSibling.replaceWith(bar);
  } else {
    element("episodes").replaceChildren(bar, make("iframe", { src: address, title: "Episodes" }));
  }
}

// ---- axis and colors

function drawBar() {
  const control = (name, label, values, apply) => make("label", {}, label, make("select", { onchange: (event) => {
    view[name] = event.target.value;
    keepView();
    apply();
  } }, ...values.map((value) => make("option", { value, selected: value === view[name] }, value))));
  const paint = () => { document.documentElement.style.colorScheme = { light: "light", dark: "dark" }[view.theme] || "light dark"; };
  element("bar").replaceChildren(control("x", "curves by", Object.keys(AXES), drawCharts), control("theme", "colors", ["auto", "light", "dark"], paint));
  paint();
}

drawBar();
ordered(true).then(() => setInterval(ordered, PERIOD_MS, false));
