// Polls the mesh's state and runs the form.

import { ApiError, fetchSamples, fetchStatus, rank } from "./api.js";
import { showAnswer } from "./answer.js";
import { byId, html, plural } from "./dom.js";
import { drawMesh, listReplicas, stationOf } from "./mesh.js";
import { drawWaterfall } from "./waterfall.js";

const POLL_MS = 2000;
const TITLES_MAX = 6;
const HEALTH_WORDS = { ready: "ready", starting: "starting", degraded: "degraded", down: "not reachable", unknown: "connecting…" };

const state = { status: null, samples: [], items: {}, last: null, times: null };

function setHealth(kind) {
  const pill = byId("health");
  if (pill.dataset.state === kind) return;
  pill.dataset.state = kind;
  pill.textContent = HEALTH_WORDS[kind];
  byId("health-news").textContent = `Mesh ${HEALTH_WORDS[kind]}`;
}

/** Bring /v1/status into what the drawing needs. */
function readStatus(body) {
  const stations = body.deployments.map((deployment) => ({
    name: deployment.name,
    target: deployment.target,
    replicas: deployment.replicas.map((replica) => ({
      id: replica.id, state: replica.state, pid: replica.pid ?? null, version: replica.version ?? "",
    })),
  }));
  stations.push({ name: "store", target: 1, replicas: [{ id: body.store.url, state: body.store.healthy ? "ready" : "down", pid: body.store.pid ?? null, version: "" }] });
  return { name: body.name, ready: body.ready, version: body.version, store: body.store, stations };
}

function show(status) {
  state.status = status;
  const broken = status.stations.filter((station) => station.replicas.every((replica) => replica.state === "down"));
  const waiting = status.stations.filter((station) => station.replicas.filter((replica) => replica.state === "ready").length < station.target);
  setHealth(broken.length > 0 ? "degraded" : waiting.length > 0 || !status.ready ? "starting" : "ready");
  byId("mesh-name").textContent = status.name === "rankmesh" ? "rankmesh" : `rankmesh · ${status.name}`;
  byId("version").textContent = status.version;
  byId("store").textContent = `${status.store.kind === "embedded" ? "embedded Valkey" : status.store.kind}, ${status.store.healthy ? "up" : "down"}`;
  drawMesh(status, state.times);
  listReplicas(status);
  const tiers = status.stations.filter((station) => station.name.startsWith("ranking:")).map((station) => station.name.slice(8));
  const select = byId("tier");
  if (select.options.length !== tiers.length + 1) {
    select.replaceChildren(...["auto", ...tiers].map((tier) => html("option", { value: tier }, tier)));
  }
}

async function poll() {
  try {
    show(readStatus(await fetchStatus()));
  } catch (error) {
    setHealth("down");
  } finally {
    setTimeout(poll, POLL_MS);
  }
}

function titleOf(id) {
  const item = state.items[String(id)];
  return item ? item.title : `item ${id}`;
}

async function loadSamples() {
  const select = byId("sample");
  try {
    const body = await fetchSamples();
    state.samples = body.samples;
    state.items = body.items;
    const options = body.samples.map((sample, index) => html("option", { value: String(index) },
      `user ${sample.user_id}, ${plural(sample.num_earlier ?? 0, "earlier event")}`));
    select.replaceChildren(...options, html("option", { value: "" }, "none: use the user id"));
    showHistory(body.samples[0] ?? null);
    if (body.provenance) byId("data-note").textContent = `Data: ${body.provenance}`;
  } catch (error) {
    select.replaceChildren(html("option", { value: "" }, "no samples in these weights"));
  }
}

function showHistory(sample) {
  const line = byId("user-history");
  const events = sample?.history ?? [];
  line.hidden = events.length === 0;
  const parts = events.slice(0, TITLES_MAX).flatMap((event, index) => [
    index > 0 ? "; " : "", html("b", {}, titleOf(event.item_id)), " ", html("span", { class: "stars", "aria-label": `${event.weight} of 5` }, "★".repeat(Math.round(event.weight))),
  ]);
  line.replaceChildren("Rated lately: ", ...parts);
}

/** Make the request that the form describes: {request, next}; throws an Error with words for the person. */
function readForm() {
  const count = Number(byId("count").value);
  if (!Number.isInteger(count) || count < 1 || count > 2000) throw new Error("Candidates must be a whole number from 1 to 2000.");
  const user = byId("user").value.trim();
  const sample = user === "" ? state.samples[Number(byId("sample").value)] : state.samples.find((other) => String(other.user_id) === user);
  if (user === "" && (sample === undefined || byId("sample").value === "")) throw new Error("Choose a held-out request or type a user id.");
  const ids = Object.keys(state.items).map(Number);
  const pool = sample ? [...sample.candidates, ...ids] : shuffled(ids, user);
  const candidates = [...new Set(pool)].slice(0, count);
  if (candidates.length < count) throw new Error(`This page knows ${candidates.length} items; ask for at most so many candidates.`);
  const stars = sample?.next_weights ?? [];
  const next = new Map((sample?.true_next ?? []).map((id, index) => [String(id), stars[index] ?? null]));
  const request = { user_id: sample ? sample.user_id : user, candidates, limit: candidates.length, surface: sample?.surface ?? state.samples[0]?.surface, tier: byId("tier").value };
  if (sample) request.timestamp_s = sample.timestamp_s; // any other user asks now
  return { request, next: new Map([...next].filter(([id]) => candidates.includes(Number(id)))) };
}

/** A fixed shuffle by the user's id: the same user gets the same candidates, so that a second request can hit. */
function shuffled(ids, seedText) {
  let seed = [...seedText].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) >>> 0, 7);
  const order = [...ids];
  for (let index = order.length - 1; index > 0; index -= 1) {
    seed = (seed * 1664525 + 1013904223) >>> 0;
    const other = seed % (index + 1);
    [order[index], order[other]] = [order[other], order[index]];
  }
  return order;
}

function fail(message) {
  const line = byId("form-error");
  line.textContent = message;
  line.hidden = false;
}

function stationTimes(answer) {
  const names = state.status.stations.map((station) => station.name);
  const times = { ingress: answer.total_ms, store: null };
  for (const stage of answer.stages) {
    const station = stationOf(stage.name, names);
    if (station !== null && station !== "ingress" && !answer.degraded.includes(station)) times[station] = (times[station] ?? 0) + stage.duration_ms;
  }
  return times;
}

async function send(query, before) {
  byId("form-error").hidden = true;
  byId("go").disabled = true;
  byId("again").disabled = true;
  byId("answer").setAttribute("aria-busy", "true");
  try {
    const start = performance.now();
    const answer = await rank(query.request);
    const roundTripMs = performance.now() - start;
    const counts = showAnswer(answer, { items: state.items, next: query.next, roundTripMs, before });
    state.last = { query, answer, counts };
    state.times = state.status === null ? null : stationTimes(answer);
    if (state.status !== null) drawMesh(state.status, state.times);
    drawWaterfall(answer.stages, answer.total_ms);
  } catch (error) {
    if (error instanceof ApiError) fail(error.retryAfter === null ? error.message : `${error.message}; try again in ${error.retryAfter} s`);
    else fail(error.name === "TimeoutError" ? "The mesh did not answer within 15 seconds." : "The mesh cannot be reached.");
  } finally {
    byId("go").disabled = false;
    byId("again").disabled = state.last === null;
    byId("answer").removeAttribute("aria-busy");
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  let query;
  try {
    query = readForm();
  } catch (error) {
    fail(error.message);
    return;
  }
  send(query, null);
});
byId("again").addEventListener("click", () => { if (state.last !== null) send(state.last.query, state.last.counts); });
byId("user").addEventListener("input", (event) => {
  const user = event.target.value.trim();
  const index = state.samples.findIndex((sample) => String(sample.user_id) === user);
  byId("sample").value = user === "" ? "0" : index < 0 ? "" : String(index);
  showHistory(state.samples[user === "" ? 0 : index] ?? null);
});
byId("sample").addEventListener("change", (event) => {
  byId("user").value = "";
  showHistory(state.samples[Number(event.target.value)] ?? null);
});
new ResizeObserver(() => { if (state.last !== null) drawWaterfall(state.last.answer.stages, state.last.answer.total_ms); }).observe(byId("waterfall").parentElement);

/** An address such as /?user=6040&candidates=200&tier=full fills the form and ranks at once. */
async function followAddress() {
  const wanted = new URLSearchParams(location.search);
  if (wanted.size === 0) return;
  for (const [parameter, id] of [["user", "user"], ["candidates", "count"], ["tier", "tier"]]) {
    if (wanted.has(parameter)) byId(id).value = wanted.get(parameter);
  }
  byId("user").dispatchEvent(new Event("input"));
  byId("form").requestSubmit();
}

Promise.allSettled([poll(), loadSamples()]).then(followAddress);
