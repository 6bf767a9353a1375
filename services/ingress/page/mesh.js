// Draws the stations from what /v1/status says: any number of shards, tiers and replicas.

import { byId, html, ms, redraw, svg } from "./dom.js";

const WIDTH = 1046;
const BOX = { width: 190, height: 62 };
const COLUMN = [6, 262, 528, 838];
const ROW = 92;
const TOP = 34;
const GAP = 7;
const MARKS_MAX = 4;
const ABOUT = {
  ingress: "admits, routes, answers",
  preprocess: "ids to table rows",
  sequence: "encodes the user once",
  speculative: "embeddings known ahead",
  foundation: "computes them after",
  store: "user log, embeddings",
};

/** Name of the station that a deployment or a stage belongs to: "ranking:full.head" -> "ranking:full". */
export function stationOf(name, stations) {
  let best = null;
  for (const station of stations) {
    if ((name === station || name.startsWith(`${station}.`) || name.startsWith(`${station}/`)) && station.length > (best?.length ?? 0)) best = station;
  }
  return best;
}

function describe(name) {
  if (name.startsWith("embedding:")) return `rows of shard ${name.slice(10)}`;
  if (name.startsWith("ranking:")) return name === "ranking:light" ? "first pass only" : "first pass, then the head";
  return ABOUT[name] ?? "";
}

/** Place every station: {name: {x, y, name}}, the frame around the tiers, and the height of the drawing. */
function place(names) {
  const shards = names.filter((name) => name.startsWith("embedding:"));
  const tiers = names.filter((name) => name.startsWith("ranking:"));
  const upper = Math.max(shards.length, 2);
  const at = {};
  const put = (name, column, row) => { if (name === "store" || names.includes(name)) at[name] = { name, x: COLUMN[column], y: TOP + row * ROW }; };
  const middle = (upper - 1) / 2;
  shards.forEach((name, index) => put(name, 2, index + (upper - shards.length) / 2));
  put("preprocess", 1, middle);
  put("sequence", 1, upper);
  put("ingress", 0, (middle + upper) / 2);
  const tierTop = Math.max((upper + 0.7 - tiers.length) / 2, 0.2);
  tiers.forEach((name, index) => put(name, 3, tierTop + index * 0.85));
  const last = Math.max(upper + 1, Math.ceil(tierTop + tiers.length * 0.85));
  put("store", 1, last);
  put("speculative", 2, last);
  put("foundation", 3, last);
  const rows = tiers.map((name) => at[name].y);
  const frame = { x: COLUMN[3] - 12, y: Math.min(...rows) - 30, width: BOX.width + 24, height: Math.max(...rows) - Math.min(...rows) + BOX.height + 42 };
  return { at, frame: tiers.length > 0 ? frame : null, height: TOP + last * ROW + BOX.height + 14 };
}

// An edge: where it starts and ends, which stations must have had a part for it to be lit, and how it looks.
function edgesOf(at, frame) {
  const edges = [];
  const port = (name, side, share = 0.5) => {
    const box = at[name];
    if (side === "left" || side === "right") return { x: box.x + (side === "right" ? BOX.width : 0), y: box.y + share * BOX.height };
    return { x: box.x + share * BOX.width, y: box.y + (side === "bottom" ? BOX.height : 0) };
  };
  const entry = (share) => ({ x: frame.x, y: frame.y + share * frame.height });
  const add = (stations, line, kind = "") => { if (stations.every((name) => at[name])) edges.push({ stations, kind, d: line() }); };
  for (const name of ["preprocess", "sequence"]) add(["ingress", name], () => curve(port("ingress", "right"), port(name, "left")));
  const shards = Object.keys(at).filter((name) => name.startsWith("embedding:"));
  for (const shard of shards) add(["preprocess", shard], () => curve(port("preprocess", "right"), port(shard, "left")));
  add(["preprocess", "speculative"], () => curve(port("preprocess", "right"), port("speculative", "left", 0.3)));
  add(["store", "sequence"], () => straight(port("store", "top"), port("sequence", "bottom")), "both");
  add(["store", "speculative"], () => straight(port("store", "right", 0.7), port("speculative", "left", 0.7)), "both");
  add(["foundation", "speculative"], () => straight(port("foundation", "left", 0.7), port("speculative", "right", 0.7)), "later");
  if (frame === null) return edges;
  shards.forEach((shard, index) => add([shard], () => curve(port(shard, "right"), entry(0.3 + (0.3 * index) / Math.max(shards.length, 2)))));
  add(["sequence"], () => curve(port("sequence", "right"), entry(0.7), at.speculative ? at.speculative.x + BOX.width - 20 : undefined));
  add(["speculative"], () => curve(port("speculative", "right", 0.3), entry(0.84)));
  add(["ingress"], () => `M${frame.x + frame.width / 2} ${frame.y}V14H${port("ingress", "top").x}V${port("ingress", "top").y - GAP}`);
  return edges;
}

function straight(from, to) {
  const across = Math.sign(to.x - from.x) * GAP;
  const down = from.x === to.x ? Math.sign(to.y - from.y) * GAP : 0;
  return `M${from.x + across} ${from.y + down}L${to.x - across} ${to.y - down}`;
}

/** From left to right; ``until`` keeps the line level up to there, so that it passes under what lies between. */
function curve(from, to, until = from.x) {
  const end = to.x - GAP;
  const bend = (end - until) * 0.5;
  return `M${from.x} ${from.y}H${until}C${until + bend} ${from.y} ${end - bend} ${to.y} ${end} ${to.y}`;
}

function arrow(id, kind) {
  return svg("marker", { id, class: kind, viewBox: "0 0 8 8", refX: 1.5, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" },
    svg("path", { d: "M0 0 8 4 0 8z" }));
}

function stateOf(station) {
  const live = station.replicas.filter((replica) => replica.state === "ready").length;
  if (live === 0) return station.replicas.some((replica) => replica.state === "starting") ? "starting" : "down";
  return live < station.target ? "starting" : "ready";
}

function replicaMark(replica, x, y) {
  const shape = replica.state === "down" ? svg("rect", { x: x - 4, y: y - 4, width: 8, height: 8, rx: 1.5 }) : svg("circle", { cx: x, cy: y, r: replica.state === "starting" ? 4 : 4.5 });
  shape.setAttribute("class", `replica ${replica.state}`);
  shape.append(svg("title", {}, `${replica.id}: ${replica.state}`));
  return shape;
}

function box(spot, station, took, used) {
  const { x, y, name } = spot;
  const live = station.replicas.filter((replica) => replica.state === "ready").length;
  const marks = station.replicas.slice(0, MARKS_MAX);
  const right = x + BOX.width - 12;
  return svg("g", { "data-state": stateOf(station), class: used ? "used" : null },
    svg("title", {}, `${name}: ${live} of ${station.target} replicas ready`),
    svg("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: name === "store" ? 18 : 9 }),
    svg("text", { class: "name", x: x + 12, y: y + 24 }, name),
    svg("text", { class: took === undefined ? "sub" : "took", x: x + 12, y: y + 45 }, took === undefined ? describe(name) : took === null ? "in use" : ms(took)),
    svg("text", { class: "sub", x: right - 13 * marks.length, y: y + 23, "text-anchor": "end" }, `${live}/${station.target}`),
    ...marks.map((replica, index) => replicaMark(replica, right - 5 - 13 * (marks.length - 1 - index), y + 19)));
}

/**
 * Draw the mesh.
 * @param status {stations: [{name, target, replicas: [{id, state, pid, version}]}]}, normalised by main.js
 * @param times  {station: milliseconds or null} of the last answer; stations that are missing had no part in it; null: no answer yet
 */
export function drawMesh(status, times) {
  const known = Object.fromEntries(status.stations.map((station) => [station.name, station]));
  const { at, frame, height } = place(Object.keys(known));
  const used = (name) => times !== null && name in times;
  const edges = edgesOf(at, frame).map((edge) => {
    const on = edge.kind !== "later" && edge.stations.every(used);
    const head = `url(#arrow${on ? "-used" : ""})`;
    const d = { class: `edge ${edge.kind}${on ? " used" : ""}`, d: edge.d, "marker-end": head, "marker-start": edge.kind === "both" ? head : null };
    return { on, node: svg("path", d) };
  });
  edges.sort((left, right) => Number(left.on) - Number(right.on));
  const hint = (x, y, words, anchor = "start") => svg("text", { class: "hint", x, y, "text-anchor": anchor }, words);
  const hints = [];
  if (at.ingress && frame) hints.push(hint(at.ingress.x + BOX.width / 2 + 10, 30, "the answer, small"));
  if (at.foundation) hints.push(hint(at.foundation.x - 8, at.foundation.y + BOX.height + 2, "after the answer", "end"));
  const drawing = byId("mesh");
  drawing.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  redraw(drawing, [
    svg("defs", {}, arrow("arrow", ""), arrow("arrow-used", "used")),
    ...(frame ? [svg("rect", { class: "frame", ...frame, rx: 14 }), hint(frame.x + 24, frame.y + 20, "one tier a request")] : []),
    ...edges.map((edge) => edge.node),
    ...Object.values(at).map((spot) => box(spot, known[spot.name], times === null ? undefined : times[spot.name], used(spot.name))),
    ...hints,
  ]);
  const sentence = status.stations.map((station) => `${station.name} ${station.replicas.filter((replica) => replica.state === "ready").length} of ${station.target}`).join(", ");
  byId("mesh-title").textContent = `The stations of the mesh; replicas ready: ${sentence}.`;
}

/** The same as a table, for those who want process ids or do not see the drawing. */
export function listReplicas(status) {
  const rows = status.stations.flatMap((station) => station.replicas.map((replica) => html("tr", {},
    html("th", { scope: "row" }, station.name),
    html("td", { class: "mono" }, replica.id),
    html("td", {}, html("i", { class: "dot", "data-state": replica.state, "aria-hidden": "true" }), ` ${replica.state}`),
    html("td", { class: "num mono" }, replica.pid === null ? "–" : String(replica.pid)),
    html("td", { class: "mono" }, replica.version || "–"))));
  byId("replica-rows").replaceChildren(...rows);
}
