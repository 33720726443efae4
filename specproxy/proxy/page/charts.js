"use strict";
const $ = id => document.getElementById(id);
const known = v => v !== null && v !== undefined;
const num = (v, d = 1) => known(v) ? v.toFixed(d) : "–";
const pct = v => known(v) ? Math.round(100 * v) + "%" : "–";
const ms = v => known(v) ? v.toFixed(v < 10 ? 2 : v < 100 ? 1 : 0) : "–";
const span = s => !known(s) ? "–" : s < 120 ? s.toFixed(s < 10 ? 1 : 0) + " s" : s < 7200 ? Math.round(s / 60) + " min"
  : s < 172800 ? (s / 3600).toFixed(1) + " h" : Math.round(s / 86400) + " days";
const seconds = s => !known(s) ? "–" : s < 10 ? s.toFixed(2) + "\u00a0s" : span(s).replace(" ", "\u00a0");

function svg(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const room = place => place.clientWidth < 420 ? 330 : 480;  // a chart's width in its own units: letters stay readable

function canvas(place, height, label) {
  const wide = room(place);
  place.replaceChildren();
  return svg(place, "svg", { viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": label });
}

function none(place, text) {
  const p = document.createElement("p");
  p.className = "quiet";
  p.textContent = text;
  place.replaceChildren(p);
}

const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const tail = (text, most) => text.length > most ? "…" + text.slice(1 - most) : text;  // lanes differ at their end
const sorted = rows => [...rows].sort((a, b) => a.workload.localeCompare(b.workload) || a.lane.localeCompare(b.lane));

// A line each: the group's name where it begins, the row's own name, marks on one axis, and a text at the end.
// rows: { group, name, text, marks: [{ at, lo, hi, shape: "disc" | "diamond" | "cap", colour }] }
function lines(place, rows, axis, label, empty) {
  if (!rows.length) return none(place, empty);
  const wide = room(place), narrow = wide < 480, left = narrow ? 168 : 196, right = wide - (narrow ? 46 : 122);
  const line = 22, height = 26 + rows.length * line;
  const place_of = axis.log ? v => Math.log(Math.min(axis.hi, Math.max(axis.lo, v)) / axis.lo) / Math.log(axis.hi / axis.lo)
    : v => (Math.min(axis.hi, Math.max(axis.lo, v)) - axis.lo) / (axis.hi - axis.lo);
  const x = v => left + (right - left) * place_of(v);
  const root = canvas(place, height, label + ": " + rows.map(r => `${r.group} ${r.name} ${r.text}`).join("; "));
  let free = -Infinity;
  for (const mark of axis.marks.filter(v => v >= axis.lo && v <= axis.hi)) {
    svg(root, "line", { x1: x(mark), x2: x(mark), y1: 18, y2: height, class: mark === axis.one ? "one" : "axis" });
    if (x(mark) - free < 36) continue;
    free = x(mark);
    svg(root, "text", { x: x(mark), y: 12, "text-anchor": "middle", class: "soft" }, axis.name(mark));
  }
  rows.forEach((r, i) => {
    const y = 32 + i * line;
    if (i === 0 || rows[i - 1].group !== r.group) svg(root, "text", { x: 0, y: y + 4 }, cut(r.group, 12));
    svg(root, "text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "soft" }, tail(r.name, narrow ? 8 : 11));
    for (const mark of r.marks) draw(root, mark, x, y);
    svg(root, "text", { x: wide, y: y + 4, "text-anchor": "end" }, narrow ? r.text.split(" ")[0] : r.text);
  });
}

function draw(root, mark, x, y) {
  if (known(mark.lo) && known(mark.hi)) {
    svg(root, "line", { x1: x(mark.lo), x2: x(mark.hi), y1: y, y2: y, class: mark.colour, "stroke-width": 4,
      "stroke-opacity": .45, "stroke-linecap": "round" });
  }
  const at = x(mark.at);
  if (mark.shape === "cap") svg(root, "line", { x1: at, x2: at, y1: y - 7, y2: y + 7, class: "cap" });
  else if (mark.shape === "diamond") {
    svg(root, "path", { d: `M${at - 5},${y} l5,-5 l5,5 l-5,5 z`, class: mark.colour + " hollow" });
  } else svg(root, "circle", { cx: at, cy: y, r: 4.5, class: mark.colour });
}

const sure = row => !known(row.ratio_lo) ? "" : row.ratio_hi < 1 ? "good" : row.ratio_lo > 1 ? "bad" : "";

function times(ratio, lo, hi) {
  if (!known(ratio)) return "–";
  return num(1 / ratio, 2) + "x" + (known(lo) ? ` (${num(1 / hi, 2)}–${num(1 / lo, 2)})` : "");
}

const spread = (value, lo, hi) => value + (known(lo) ? ` (${lo}–${hi})` : "");

function drawSpeed(place, kinds) {
  const rows = sorted(kinds.filter(r => known(r.ratio))).map(r => ({
    group: r.workload, name: r.lane, text: times(r.ratio, r.ratio_lo, r.ratio_hi), marks: [
      ...(r.whole_ratio_cap > 1 / 16 ? [{ shape: "cap", at: 1 / r.whole_ratio_cap }] : []),
      { at: 1 / r.ratio, lo: known(r.ratio_hi) ? 1 / r.ratio_hi : null, hi: known(r.ratio_lo) ? 1 / r.ratio_lo : null,
        colour: sure(r) || "mid" },
      ...(known(r.whole_ratio) ? [{ shape: "diamond", at: 1 / r.whole_ratio, colour: sure(r) || "mid" }] : []),
    ] }));
  const ends = rows.flatMap(r => r.marks.flatMap(m => [m.at, m.lo, m.hi])).filter(known);
  const lo = Math.max(1 / 16, Math.min(0.5, ...ends) / 1.1), hi = Math.min(16, Math.max(2, ...ends) * 1.1);
  const axis = { log: true, lo, hi, one: 1, marks: [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], name: v => v + "x" };
  lines(place, rows, axis, "Decode speed against plain", "Nothing can be compared with plain yet.");
}

function drawTimePerToken(place, kinds) {
  const rows = sorted(kinds.filter(r => known(r.tpt_ms))).map(r => ({
    group: r.workload, name: r.lane, text: spread(ms(r.tpt_ms), ms(r.tpt_lo_ms), ms(r.tpt_hi_ms)).replace(" (–––)", ""),
    marks: [{ at: r.tpt_ms, lo: r.tpt_lo_ms, hi: r.tpt_hi_ms, colour: sure(r) || "mid" }] }));
  const ends = rows.flatMap(r => [r.marks[0].at, r.marks[0].lo, r.marks[0].hi]).filter(v => v > 0);
  const axis = { log: true, lo: Math.min(...ends) / 1.3, hi: Math.max(...ends) * 1.3,
    marks: [.1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000], name: v => String(v) };
  lines(place, rows, axis, "Time per token in milliseconds", "No request has been measured yet.");
}

function drawAcceptance(place, kinds) {
  const rows = sorted(kinds.filter(r => known(r.acceptance))).map(r => ({
    group: r.workload, name: r.lane,
    text: pct(r.acceptance) + (known(r.acceptance_lo) ? ` (${pct(r.acceptance_lo)}–${pct(r.acceptance_hi)})` : ""),
    marks: [{ at: r.acceptance, lo: r.acceptance_lo, hi: r.acceptance_hi, colour: "mid" }] }));
  const axis = { lo: 0, hi: 1, marks: [0, .25, .5, .75, 1], name: pct };
  lines(place, rows, axis, "Guesses accepted", "No lane has told of any guesses yet.");
}

function drawAuto(place, workloads) {
  const rows = workloads.filter(r => known(r.auto_tok_s)).flatMap(r => {
    const gain = r.auto_vs_best_fixed, colour = !known(gain) ? "mid" : gain < 1 ? "bad" : "good";
    const text = num(r.auto_tok_s) + (known(gain) ? ` (${num(gain, 2)}x)` : "");
    const fixed = Object.entries(r.fixed_tok_s).sort((a, b) => b[1] - a[1]);
    return [{ group: r.workload, name: "auto", text, marks: [{ at: r.auto_tok_s, colour }] },
      ...fixed.map(([name, at]) => ({ group: r.workload, name, text: num(at), marks: [{ at, colour: "mid" }] }))];
  });
  const axis = { lo: 0, hi: Math.max(1, ...rows.map(r => r.marks[0].at)) * 1.1, name: String,
    marks: [0, 5, 10, 20, 50, 100, 150, 200, 300, 500, 1000] };
  lines(place, rows, axis, "Auto against fixed strategies", "Auto has answered no request yet.");
}

const drafting = r => r.speculation ? "drafting" : "plain";

function drawComplete(place, rows) {
  const shown = rows.filter(r => r.n > 0).map(r => ({
    group: r.workload, name: drafting(r), text: seconds(r.p50_s),
    marks: [{ at: r.p50_s, lo: r.p50_s, hi: r.p95_s, colour: r.speculation ? "s1" : "s0" }] }));
  const ends = shown.flatMap(r => [r.marks[0].at, r.marks[0].hi]);
  const axis = { log: true, lo: Math.min(...ends) / 1.5, hi: Math.max(...ends) * 1.5,
    marks: [.01, .1, .2, .5, 1, 2, 5, 10, 20, 60, 120, 300, 600], name: v => v + "s" };
  lines(place, shown, axis, "Time to completion", "No tool call or JSON answer yet.");
}

function drawShare(place, kinds) {
  const groups = [...new Set(kinds.filter(r => r.lane).map(r => r.workload))].sort();
  if (!groups.length) return none(place, "No request has been measured yet.");
  const lanes = [...new Set(kinds.filter(r => r.lane && r.strategy !== "plain").map(r => r.lane))].sort();
  const colour = r => r.strategy === "plain" ? "s0" : "s" + (1 + lanes.indexOf(r.lane) % 6);
  const wide = room(place), left = 96, right = wide - 46, line = 24;
  const rows = groups.map(g => kinds.filter(r => r.workload === g && r.lane && r.share > 0)
    .sort((a, b) => (a.strategy === "plain" ? 1 : 0) - (b.strategy === "plain" ? 1 : 0) || a.lane.localeCompare(b.lane)));
  const root = canvas(place, (groups.length + 1) * line + 4, "Where requests went: "
    + rows.map((parts, i) => `${groups[i]}: ${parts.map(r => `${r.lane} ${pct(r.share)}`).join(", ")}`).join("; "));
  rows.forEach((parts, i) => {
    let x = left;
    svg(root, "text", { x: 0, y: i * line + 16 }, cut(groups[i], 13));
    for (const r of parts) {
      const width = (right - left) * r.share, text = `${r.lane} ${pct(r.share)}`;
      const bar = svg(root, "rect", { x, y: i * line + 3, width, height: line - 6, class: colour(r), stroke: "none" });
      svg(bar, "title", {}, text);
      const fit = [text, r.lane].find(t => t.length * 8 < width - 8);
      if (fit) svg(root, "text", { x: x + 5, y: i * line + 16, class: "in" }, fit);
      x += width;
    }
    svg(root, "text", { x: wide, y: i * line + 16, "text-anchor": "end", class: "soft" }, parts.reduce((n, r) => n + r.n, 0));
  });
  let x = 0;
  for (const lane of [...lanes, "plain"]) {
    const kind = lane === "plain" ? "s0" : "s" + (1 + lanes.indexOf(lane) % 6), y = groups.length * line + 8;
    svg(root, "rect", { x, y, width: 10, height: 10, class: kind, stroke: "none" });
    svg(root, "text", { x: x + 14, y: y + 10, class: "soft" }, tail(lane, 9));
    x += 30 + 8 * Math.min(9, lane.length);
  }
}

function drawCurve(place, curves) {
  const shown = Object.entries(curves || {}).filter(([, points]) => points.length > 1).slice(0, 3);
  if (!shown.length) return none(place, "It begins once plain has been measured.");
  const all = shown.flatMap(([, points]) => points);
  const most = Math.max(...all.map(p => p[0])), top = Math.max(.1, ...all.map(p => p[1]));
  const bottom = Math.min(-.1, ...all.map(p => p[1])), height = 190 + 18 * (shown.length > 1 ? shown.length : 0);
  const right = room(place) - 8, x = n => 52 + (right - 52) * n / most, y = g => 14 + 150 * (top - g) / (top - bottom);
  const root = canvas(place, height, "Gain over plain: "
    + shown.map(([name, points]) => `${name} ${pct(points.at(-1)[1])} after ${points.at(-1)[0]} requests`).join("; "));
  for (const g of [top, 0, bottom]) {
    svg(root, "line", { x1: 52, x2: right, y1: y(g), y2: y(g), class: g === 0 ? "one" : "axis" });
    svg(root, "text", { x: 44, y: y(g) + 4, "text-anchor": "end", class: "soft" }, (g > 0 ? "+" : "") + pct(g));
  }
  svg(root, "text", { x: right, y: 182, "text-anchor": "end", class: "soft" }, `${most} requests`);
  shown.forEach(([name, points], i) => {
    const kind = "curve " + ["a", "b", "c"][i];
    svg(root, "polyline", { points: points.map(([n, g]) => `${x(n)},${y(g)}`).join(" "), class: kind });
    if (shown.length > 1) {
      svg(root, "line", { x1: 52, x2: 82, y1: 198 + 18 * i, y2: 198 + 18 * i, class: kind });
      svg(root, "text", { x: 90, y: 202 + 18 * i, class: "soft" }, name);
    }
  });
}
