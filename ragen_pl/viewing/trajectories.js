// Text of a record enters the page by `make`, and never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const SPANS = data.spans;
const COLUMNS = { advantage: "advantages", value: "values", return: "returns", "log-prob": "logprobs" };

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const image = (name, alt) => (data.images[name] ? make("img", { src: data.images[name], alt }) : null);
const hasInvalidTurn = (episode) => episode.turns.some((turn) => !turn.valid);

// The largest absolute value of each column on the page: one scale makes tokens, turns and episodes comparable.
const scale = {}, present = {};
for (const [label, column] of Object.entries(COLUMNS)) {
  let largest = 0;
  for (const episode of data.episodes) for (const turn of episode.turns) if (turn[column] && turn.response_pieces) {
    present[label] = true;
    for (const value of turn[column]) if (value !== null) largest = Math.max(largest, Math.abs(value));
  }
  scale[label] = largest || 1;
}
const hasMasks = data.episodes.some((episode) => episode.turns.some((turn) => turn.loss_mask && turn.response_pieces));

function shade(label, value) {
  if (value === null || value === undefined) return "";
  const share = Math.round(72 * Math.min(1, Math.abs(value) / scale[label]));
  return `color-mix(in srgb, var(--${value < 0 ? "minus" : "plus"}) ${share}%, transparent)`;
}

function tokenText(turn, index) {
  const values = Object.entries(COLUMNS).filter(([, column]) => turn[column])
    .map(([label, column]) => `${label} ${number(turn[column][index])}`);
  if (turn.loss_mask) values.push(`M_loss ${turn.loss_mask[index] ? 1 : 0}`);
  if (turn.advantage_mask) values.push(`M_adv ${turn.advantage_mask[index] ? 1 : 0}`);
  return `${JSON.stringify(visible(turn.response_pieces[index]))} ${SPANS[turn.spans[index]]}: ${values.join("  ")}`;
}

function responseOf(turn) {
  const response = make("div", { class: "response" });
  if (!turn.response_pieces) return make("div", { class: "response" }, visible(turn.response));
  turn.response_pieces.forEach((piece, index) => {
    const kind = SPANS[turn.spans[index]];
    const token = make("span", { class: `token ${kind}`, title: tokenText(turn, index) },
      piece === "" ? (kind === "end" ? "∎" : "·") : visible(piece));
    if (turn.loss_mask && turn.loss_mask[index]) token.classList.add("in-loss");
    if (turn.advantage_mask && turn.advantage_mask[index]) token.classList.add("in-advantage");
    for (const column of Object.values(COLUMNS)) {
      if (turn[column]) token.dataset[column] = turn[column][index];
    }
    response.append(token, make("wbr"));  // lines break between tokens
  });
  return response;
}

function foldable(label, fill) {
  const details = make("details", {}, make("summary", {}, label));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(fill());
  });
  return details;
}

function promptOf(turn) {
  const box = make("div", { class: "prompt" });
  turn.prompt_text.split("<image>").forEach((text, index) => {
    const slot = index ? turn.prompt_images[index - 1] : null;
    if (index) box.append((slot && image(slot, `image ${index} of the prompt`)) || "<image>");
    box.append(visible(text));
  });
  return box;
}

function tokenTable(turn) {
  const columns = Object.entries(COLUMNS).filter(([, column]) => turn[column]);
  const masks = ["loss_mask", "advantage_mask"].filter((name) => turn[name]);
  const head = ["token", "span", ...columns.map(([label]) => label), ...masks.map((name) => (name === "loss_mask" ? "M_loss" : "M_adv"))];
  const rows = turn.response_pieces.map((piece, index) => make("tr", {},
    make("td", {}, piece === "" ? "∎" : visible(piece)), make("td", {}, SPANS[turn.spans[index]]),
    ...columns.map(([, column]) => make("td", {}, number(turn[column][index]))),
    ...masks.map((name) => make("td", {}, turn[name][index] ? "1" : "0"))));
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((label) => make("th", { scope: "col" }, label)))), make("tbody", {}, ...rows)));
}

function turnOf(turn) {
  const images = turn.images.map((name) => image(name, `observation in turn ${turn.turn}`)).filter(Boolean);
  const badges = [
    turn.valid ? null : make("span", { class: "badge bad" }, "invalid"),
    turn.hit_length_limit ? make("span", { class: "badge bad" }, "hit length limit") : null,
    turn.valid && !turn.effective ? make("span", { class: "badge soft" }, "no effect") : null,
  ];
  const facts = make("div", { class: "facts" }, make("span", { class: "soft" }, `turn ${turn.turn}`),
    make("span", {}, "action ", make("b", {}, turn.actions.length ? visible(turn.actions.join(" || ")) : "none")),
    make("span", { class: turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : "" }, `reward ${number(turn.reward, 2)}`),
    turn.values && turn.values.length ? make("span", {}, `value ${number(turn.values[0], 2)}`) : null,
    turn.advantages && turn.advantages.length ? make("span", {}, `advantage ${number(mean(turn.advantages), 2)}`) : null,
    ...badges);
  const text = make("div", { class: "text" }, facts, responseOf(turn),
    turn.observation.trim() ? make("div", { class: "observation", tabIndex: 0 }, visible(turn.observation)) : null,
    turn.prompt_text === null ? null : foldable(`prompt as the model reads it (${turn.prompt_tokens} tokens)`, () => promptOf(turn)),
    turn.response_pieces ? foldable(`${turn.response_pieces.length} tokens as a table`, () => tokenTable(turn)) : null);
  return make("section", { class: images.length ? "turn" : "turn plain" },
    images.length ? make("div", { class: "see" }, ...images) : null, text);
}

// A failed episode was broken by its environment or a server: it is no outcome of the agent.
const isFailed = (episode) => episode.status === "failed";
function outcomeOf(episode) {
  if (isFailed(episode)) return "⚠ failed";
  return episode.success ? "✓ success" : "✗ no success";
}

function headingOf(episode) {
  const name = isSingle(episode) ? `group ${episode.group}` : `member ${episode.member}`;
  const player = episode.policy === "policy" ? null : episode.policy;
  return visible([episode.environment, player, name].filter(Boolean).join(" · "));
}

// An earlier policy has the number of the iteration that began with its weights, or the name of a file.
function opponentOf(episode) {
  const name = episode.opponent ? visible(episode.opponent) : "";
  return name && `against ${/^\d+$/.test(name) ? `the policy of iteration ${name}` : name}`;
}

function episodeOf(episode) {
  const facts = [`${episode.turns.length} turn${episode.turns.length === 1 ? "" : "s"}`, `return ${number(episode.return, 2)}`,
    episode.status.replace("_", " "), episode.difficulty === null ? "" : `difficulty ${episode.difficulty}`,
    Number.isInteger(episode.seat) ? `seat ${episode.seat}` : "", opponentOf(episode)];
  const userErrors = (episode.user_errors || []).flat();
  const finals = episode.final_images.map((name) => image(name, "state after the last turn")).filter(Boolean);
  return make("article", { class: "episode" },
    make("header", {}, make("h3", { title: `seed ${episode.seed}` }, headingOf(episode)),
      make("b", { class: episode.success ? "good" : "bad" }, outcomeOf(episode)),
      ...facts.filter(Boolean).map((fact) => make("span", { class: "soft" }, fact))),
    episode.error ? make("p", { class: "bad" }, visible(episode.error)) : null,
    userErrors.length ? make("p", { class: "bad" }, `errors of the simulated user: ${visible(userErrors.join(", "))}`) : null,
    ...episode.turns.map(turnOf),
    finals.length ? make("div", { class: "final" }, make("span", { class: "soft" }, "end"), ...finals) : null);
}

// ---- filters; the address keeps them behind #, so a view can be linked to

const longest = Math.max(1, ...data.episodes.map((episode) => episode.turns.length));
const shades = [...Object.keys(COLUMNS).filter((word) => present[word]), "none"];
const CONTROLS = {
  outcome: ["outcome", ["all", "success", "no success", "failed"]],
  invalid: ["responses", ["all", "some invalid", "all valid"]],
  min: ["turns from", 1], max: ["to", longest],
  shade: ["shading", shades], masks: ["masks", hasMasks ? ["none", "loss", "advantage", "both"] : ["none"]],
  order: ["order", [...new Set([data.order, "as played", "no success first", "return", "length"])]],
  text: ["text", ""], theme: ["colors", ["auto", "light", "dark"]],
};
const state = Object.fromEntries(Object.entries(CONTROLS).map(([name, [, values]]) => [name, Array.isArray(values) ? values[0] : values]));
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  const allowed = CONTROLS[name] && CONTROLS[name][1];
  if (Array.isArray(allowed) ? allowed.includes(value) : allowed !== undefined) {
    state[name] = typeof allowed === "number" ? Number(value) || allowed : value;
  }
}

const bar = document.getElementById("bar"), main = document.getElementById("groups");
for (const [name, [label, values]] of Object.entries(CONTROLS)) {
  if (Array.isArray(values) && values.length < 2) continue;
  const input = Array.isArray(values)
    ? make("select", { id: name }, ...values.map((value) => make("option", { value, selected: state[name] === value }, value)))
    : make("input", { id: name, type: typeof values === "number" ? "number" : "search", value: state[name] });
  if (typeof values === "number") { input.min = 0; input.max = longest; }
  bar.append(make("label", {}, label, input));
  input.addEventListener("input", () => {
    state[name] = typeof values === "number" ? Number(input.value) : input.value;
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
    update(name);
  });
}
bar.addEventListener("submit", (event) => event.preventDefault());
const legend = make("span", { id: "legend" }), count = make("output", { id: "count" });
bar.append(legend, count);

function matches(episode) {
  const search = state.text.toLowerCase();
  const outcome = isFailed(episode) ? "failed" : episode.success ? "success" : "no success";
  return (state.outcome === "all" || outcome === state.outcome)
    && (state.invalid === "all" || hasInvalidTurn(episode) === (state.invalid === "some invalid"))
    && episode.turns.length >= state.min && episode.turns.length <= state.max
    && (!search || episode.turns.some((turn) => `${turn.response}\n${turn.observation}`.toLowerCase().includes(search)));
}

const cards = data.episodes.map(() => null);
const isSingle = (episode) => groups.get(episode.row).length === 1;
const groups = new Map();  // members of a group share their initial state and stand side by side
data.episodes.forEach((episode, index) => {
  if (!groups.has(episode.row)) groups.set(episode.row, []);
  groups.get(episode.row).push(index);
});

function groupOf(kept) {
  const first = data.episodes[kept[0]];
  return make("section", { class: "group" },
    make("h2", {}, `Group ${first.group}`, make("span", { class: "soft" }, `  seed ${first.seed}`)),
    make("div", { class: "members" }, ...kept.map((index) => cards[index])));
}

function singlesOf(kept) {
  return make("section", { class: "singles" }, ...kept.map((index) => cards[index]));
}

// A group of several members has a row of its own. Neighboring groups of one share a grid that fills the width.
function rowsOf(sections) {
  const rows = [];
  for (const kept of sections) {
    const single = isSingle(data.episodes[kept[0]]), last = rows.at(-1);
    if (single && last && last.single) last.kept.push(...kept);
    else rows.push({ single, kept: [...kept] });
  }
  return rows;
}

const urgency = (episode) => (isFailed(episode) ? 2 : episode.success ? 0 : 1);

function draw() {
  let episodes = 0;
  const sections = [];
  for (const members of groups.values()) {
    const kept = members.filter((index) => matches(data.episodes[index]));
    if (!kept.length) continue;
    episodes += kept.length;
    sections.push(kept);
  }
  const rank = {
    return: (kept) => mean(kept.map((index) => data.episodes[index].return)),
    length: (kept) => mean(kept.map((index) => data.episodes[index].turns.length)),
    "no success first": (kept) => Math.max(...kept.map((index) => urgency(data.episodes[index]))),
  }[state.order];
  if (rank) sections.sort((left, right) => rank(right) - rank(left));
  for (const kept of sections) for (const index of kept) cards[index] = cards[index] || episodeOf(data.episodes[index]);
  main.replaceChildren(...rowsOf(sections).map((row) => (row.single ? singlesOf(row.kept) : groupOf(row.kept))));
  count.textContent = `${episodes} of ${data.episodes.length} episodes`;
  paint();
}

function paint() {
  const column = COLUMNS[state.shade];
  for (const token of main.getElementsByClassName("token")) {
    const value = column && token.dataset[column];
    token.style.background = value === undefined || value === "" || value === "null" ? "" : shade(state.shade, Number(value));
  }
  main.className = `masks-${state.masks}`;
  document.documentElement.style.colorScheme = state.theme === "auto" ? "" : state.theme;
  const bars = make("i");
  bars.style.background = "linear-gradient(to right, var(--minus), transparent, var(--plus))";
  legend.replaceChildren(...(column ? [number(-scale[state.shade], 2), bars, number(scale[state.shade], 2)] : []));
}

function update(name) { if (["shade", "masks", "theme"].includes(name)) paint(); else draw(); }

const about = document.getElementById("about");
for (const kind of ["mouseover", "click"]) {
  main.addEventListener(kind, (event) => {
    if (event.target.classList.contains("token")) about.textContent = event.target.title;
  });
}

const turns = data.episodes.flatMap((episode) => episode.turns);
document.getElementById("overview").textContent = [
  data.note, `success ${data.totals.success} of ${data.totals.episodes - data.totals.failed}`,
  data.totals.failed ? `${data.totals.failed} failed` : "",
  `${data.note ? "shown: " : ""}return ${number(mean(data.episodes.map((episode) => episode.return)), 2)}`,
  `${number(mean(data.episodes.map((episode) => episode.turns.length)), 1)} turns`,
  `${turns.filter((turn) => !turn.valid).length} of ${turns.length} responses invalid`,
].filter(Boolean).join(" · ");
draw();
