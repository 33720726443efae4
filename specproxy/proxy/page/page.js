const bytes = v => v > 0 ? (v >= 2 ** 30 ? (v / 2 ** 30).toFixed(1) + " GiB" : Math.round(v / 2 ** 20) + " MiB") : "–";
const clock = at => new Date(at * 1000).toLocaleTimeString();
const health = r => r.health === "ready" ? "good" : r.health === "starting" ? "" : "bad";
const plans = steps => Object.entries(steps).sort((a, b) => b[1] - a[1]).slice(0, 4).map(([plan, n]) => `${n} × ${plan}`).join(", ");

const LANES = [["Lane", r => r.id], ["Strategy", r => r.strategy + (r.n_max ? ":" + r.n_max : "")],
  ["Health", r => r.health, "", health], ["In flight", r => r.in_flight, "n"], ["tok/s lately", r => num(r.tok_s), "n"],
  ["Memory", r => bytes(r.memory_bytes), "n"], ["Note", r => r.note, "note"]];
const KINDS = [["Workload", r => r.workload], ["Lane", r => r.lane || "–"], ["n", r => r.n, "n"], ["Share", r => pct(r.share), "n"],
  ["Accepted", r => pct(r.acceptance), "n"], ["tok/s", r => num(r.tok_s), "n"], ["ms/token", r => ms(r.tpt_ms), "n"],
  ["Decoding", r => times(r.ratio, r.ratio_lo, r.ratio_hi), "n", sure],
  ["Whole request", r => times(r.whole_ratio, r.whole_ratio_lo, r.whole_ratio_hi), "n"],
  ["At most", r => r.whole_ratio_cap > 0 ? times(r.whole_ratio_cap) : "–", "n"],
  ["Prompt share of time", r => pct(r.prefill_share), "n"]];
const TIMES = [["Workload", r => r.workload], ["Lanes", drafting], ["n", r => r.n, "n"],
  ["p50", r => seconds(r.p50_s), "n"], ["p95", r => seconds(r.p95_s), "n"]];
const RECENT = [["When", r => clock(r.at)], ["Workload", r => r.workload], ["Lane", r => r.lane || "–"],
  ["Tokens", r => r.output_tokens, "n", null, "tokens"], ["tok/s", r => num(r.tok_s), "n", null, "tok/s"],
  ["Accepted", r => pct(r.acceptance), "n", null, "accepted"],
  ["Outcome", r => r.outcome, "", r => r.outcome === "complete" ? "" : "bad"],
  ["Why", r => [r.reason ? `${r.rule}: ${r.reason}` : r.rule, plans(r.steps), r.stopped_drafting].filter(Boolean).join("; "),
    "note"]];
const ALARMS = ["drift", "lane_quarantined", "lane_unhealthy"];

function fill(table, columns, rows, none) {
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  for (const [name, , kind] of columns) {
    const th = document.createElement("th");
    th.textContent = name;
    th.scope = "col";
    th.className = kind || "";
    head.append(th);
  }
  const body = table.createTBody();
  for (const row of rows) {
    const tr = body.insertRow();
    for (const [, value, kind, colour, unit] of columns) {
      const td = tr.insertCell();
      td.textContent = value(row);
      td.className = [kind, colour && colour(row)].filter(Boolean).join(" ");
      if (unit) td.dataset.unit = unit;
    }
  }
  if (!rows.length) {
    const td = body.insertRow().insertCell();
    td.colSpan = columns.length;
    td.textContent = none;
  }
}

function listEvents(place, events) {
  place.replaceChildren(...[...events].sort((a, b) => b.at - a.at).slice(0, 15).map(e => {
    const item = document.createElement("li"), when = document.createElement("span"), kind = document.createElement("span");
    when.className = "quiet";
    when.textContent = new Date(e.at * 1000).toLocaleString() + "  ";
    kind.className = ALARMS.includes(e.kind) ? "bad" : "";
    kind.textContent = e.kind.replaceAll("_", " ");
    item.append(when, kind, `${e.subject ? " " + e.subject : ""}${e.message ? ": " + e.message : ""}`);
    return item;
  }));
  if (!events.length) none(place, "None so far.");
}

function head(s) {
  const up = s.upstreams.map(u => u.url + (u.reachable ? ` (${`${u.kind} ${u.version}`.trim()})` : " (not reachable)"));
  const rungs = [s.rung, ...s.upstreams.map(u => u.rung)].filter(Boolean)
    .filter((r, i, all) => all.findIndex(o => o.why === r.why) === i);
  return [...up, ...rungs.flatMap(r => [`Rung ${r.number} (${r.name}): ${r.why}`, ...r.advice])].join("\n");
}

function tiles(s) {
  $("saved").textContent = span(Math.abs(s.saved_s));
  $("saved-label").textContent = s.saved_s >= 0 ? "decoding saved" : "decoding lost";
  $("saved").className = s.saved_s >= 0 ? "" : "bad";
  const gains = Object.values(s.learning_curve || {}).map(points => points.at(-1)).filter(Boolean);
  const gain = gains.sort((a, b) => b[0] - a[0])[0];
  $("gain").textContent = gain ? (gain[1] > 0 ? "+" : "") + pct(gain[1]) : "–";
  $("total").textContent = s.requests.total;
  $("flight").textContent = s.requests.in_flight;
}

let shown = {};
function once(name, data, draw) {  // what has not changed is left alone, with what is selected or scrolled in it
  const text = JSON.stringify(data);
  if (shown[name] !== text) {
    draw(data);
    shown[name] = text;
  }
}

function show(s) {
  $("state").textContent = `${s.version} at ${s.listen}, up ${span(s.uptime_s)}`;
  document.body.classList.remove("stale");
  once("head", head(s), text => { $("head").textContent = text; });
  tiles(s);
  once("lanes", s.lanes, data => fill($("lanes"), LANES, data, "No lane yet."));
  once("curve", s.learning_curve, data => drawCurve($("curve"), data));
  once("kinds", s.kinds, data => {
    drawSpeed($("speed"), data);
    drawShare($("share"), data);
    drawTimePerToken($("tpt"), data);
    drawAcceptance($("accept"), data);
    fill($("kinds"), KINDS, data, "No request has been measured yet.");
  });
  once("auto", s.engine || [], data => {
    $("auto").closest("section").hidden = !data.length;  // there is no engine
    drawAuto($("auto"), data);
  });
  once("complete", s.time_to_complete, data => {
    drawComplete($("complete"), data);
    fill($("times"), TIMES, data, "");
    $("times").closest(".wide").hidden = !data.length;  // the chart beside it says so
  });
  once("recent", s.recent, data => fill($("recent"), RECENT, data, "None yet."));
  once("events", s.events || [], data => listEvents($("events"), data));
}

// --- where it comes from: a stream while there is one, looks by hand while there is none ---

const SILENCE = 12000, AGAIN = 2000;  // ms without a sign of life; ms between looks
let state = null, source = null, timer = 0, asked = 0, heard = 0, lately = 0, paused = false;

function take(news) {
  state = Object.assign(state || {}, news);
  heard = lately = Date.now();
  show(state);
}

function listen() {
  stop();
  lately = Date.now();
  source = new EventSource("/specproxy/api/events");
  source.onmessage = event => take(JSON.parse(event.data));
  source.onerror = () => look();  // broken off, or refused: then looks by hand go on until it is taken again
  timer = setInterval(() => { if (Date.now() - lately > SILENCE) look(); }, AGAIN);
}

function stop() {
  asked += 1;  // an answer that is still to come is too late
  if (source) source.close();
  source = null;
  clearTimeout(timer);
  clearInterval(timer);
}

async function get(path) {
  const reply = await fetch("/specproxy/api/" + path, { cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (!reply.ok) throw new Error("HTTP " + reply.status);
  return reply.json();
}

async function look() {
  stop();
  const mine = asked;
  let found = null, error = null;
  try {
    const [s, r] = await Promise.all([get("status"), get("recent?limit=20")]);
    found = Object.assign(s, r);
  } catch (caught) {
    error = caught;
  }
  if (mine !== asked) return;
  if (found) take(found);
  else lost(error);
  timer = setTimeout(found ? listen : look, AGAIN);
}

function lost(error) {
  const since = state ? `; what is below is from ${new Date(heard).toLocaleTimeString()}` : "";
  $("state").textContent = `The proxy does not answer (${error.message}), trying again${since}.`;
  document.body.classList.add("stale");
}

function toggle() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) stop();
  else listen();
}
$("pause").addEventListener("click", toggle);
document.addEventListener("keydown", event => {
  if (event.key === "p" && !event.ctrlKey && !event.metaKey && !event.altKey) toggle();
});
let drawnAt = innerWidth;
addEventListener("resize", () => {
  if (state === null || drawnAt === innerWidth) return;
  drawnAt = innerWidth;
  shown = {};
  show(state);
});
document.addEventListener("visibilitychange", () => {
  if (paused) return;
  if (document.hidden) stop();
  else listen();
});
listen();
