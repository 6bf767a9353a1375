// The ranked titles, the badges that say how they came to be, and what the speculative cache knew.

import { byId, html, ms, percent, plural, redraw, svg } from "./dom.js";

const FIRST_ROWS = 20;
const LEVELS = ["exact", "user", "none"];
const LEVEL_WORDS = { exact: "exact pair", user: "user's own group", none: "none" };
const PASS_WORDS = { full: "full", first: "first" };

function scoreCell(value) {
  return html("td", { class: "score" },
    svg("svg", { viewBox: "0 0 62 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { width: 62, height: 8, rx: 2 }),
      svg("rect", { width: Math.max(62 * Math.min(value, 1), 0.5), height: 8, rx: 2 })),
    percent(value));
}

const nextWords = (stars) => (stars === null ? "★ rated next" : `★ rated ${stars} next`);

function rowOf(candidate, index, objectives, items, next) {
  const item = items[String(candidate.id)];
  const isNext = next.has(String(candidate.id));
  const about = item ? [item.year || null, item.genres.join(", ")].filter(Boolean).join(" · ") : "not in the catalogue";
  return html("tr", { class: isNext ? "next" : null },
    html("td", { class: "num" }, String(index + 1)),
    html("td", { class: "film" }, item ? item.title : `item ${candidate.id}`, isNext ? " " : null,
      isNext ? html("span", { class: "seen" }, nextWords(next.get(String(candidate.id)))) : null, html("span", { class: "about" }, about)),
    ...objectives.map((name) => scoreCell(candidate.scores[name] ?? 0)),
    html("td", { class: "num" }, candidate.value.toFixed(4)),
    html("td", { class: "level" }, PASS_WORDS[candidate.scored_by] ?? candidate.scored_by),
    html("td", { class: `level ${candidate.speculative}` }, LEVEL_WORDS[candidate.speculative] ?? candidate.speculative));
}

function badgesOf(answer) {
  const badges = [
    html("li", { title: answer.tier_reason }, `tier ${answer.tier}${answer.tier_reason ? ` (${answer.tier_reason})` : ""}`),
    html("li", {}, plural(answer.history_length, "event") + " of history"),
    html("li", { class: "mono" }, answer.weights_version),
  ];
  if (answer.degraded.length === 0) badges.push(html("li", { class: "ok" }, "whole answer"));
  for (const station of answer.degraded) badges.push(html("li", { class: "warn" }, `degraded: ${station} (${answer.reasons[station] ?? "no reason given"})`));
  const unknown = Object.entries(answer.num_oov).filter(([, count]) => count > 0);
  for (const [feature, count] of unknown) badges.push(html("li", { class: "warn" }, `${plural(count, "id")} of ${feature} unknown`));
  return badges;
}

function lead(answer, next, roundTripMs) {
  const places = answer.candidates.flatMap((candidate, index) => (next.has(String(candidate.id)) ? [index + 1] : []));
  let text = `${plural(answer.num_candidates, "candidate")} ranked in ${ms(answer.total_ms)} (${ms(roundTripMs)} with the trip from this page).`;
  if (next.size > 0) {
    const head = places.filter((place) => place <= FIRST_ROWS).length;
    text += ` Of the ${plural(next.size, "item")} that this user really chose next, ${head} ${head === 1 ? "is" : "are"} among the first ${FIRST_ROWS}`;
    text += places.length > 0 ? `; their places: ${places.slice(0, 12).join(", ")}${places.length > 12 ? " and lower" : ""}.` : ".";
  }
  return text;
}

function drawLevels(answer, before) {
  const counts = Object.fromEntries(LEVELS.map((level) => [level, answer.candidates.filter((candidate) => candidate.speculative === level).length]));
  const total = Math.max(answer.candidates.length, 1);
  const drawing = byId("levels");
  let x = 0;
  drawing.setAttribute("viewBox", "0 0 100 14");
  drawing.setAttribute("preserveAspectRatio", "none");
  redraw(drawing, LEVELS.filter((level) => counts[level] > 0).map((level) => {
    const width = (100 * counts[level]) / total;
    x += width;
    return svg("rect", { class: level, x: x - width, width: Math.max(width - 0.4, 0.3), height: 14 });
  }));
  byId("levels-text").textContent = `${counts.exact} exact pairs, ${counts.user} from the user's own group, ${counts.none} without.`;
  byId("levels-note").textContent = before === null
    ? "After this answer the foundation workers compute the head pairs. Rank again to find them as exact hits."
    : counts.exact > before.exact
      ? `${counts.exact - before.exact} more exact pairs than in the answer before: the foundation workers computed them since.`
      : `The answer before had ${before.exact} exact pairs.`;
  return counts;
}

/**
 * Show one answer.
 * @param answer the body of POST /v1/rank
 * @param context {items, next: Map of id string to rating or null, roundTripMs, before: level counts of the same request's last answer, or null}
 * @returns the level counts of this answer
 */
export function showAnswer(answer, context) {
  const objectives = Object.keys(answer.candidates[0]?.scores ?? { click: 0, conversion: 0 }).slice(0, 2);
  objectives.forEach((name, index) => { byId(`score-${index + 1}`).textContent = `P(${name})`; });
  byId("badges").replaceChildren(...badgesOf(answer));
  byId("answer-news").textContent = lead(answer, context.next, context.roundTripMs);
  const rows = answer.candidates.map((candidate, index) => rowOf(candidate, index, objectives, context.items, context.next));
  byId("rows").replaceChildren(...rows.slice(0, FIRST_ROWS));
  const more = byId("more");
  more.hidden = rows.length <= FIRST_ROWS;
  more.textContent = `Show all ${rows.length}`;
  more.onclick = () => { byId("rows").append(...rows.slice(FIRST_ROWS)); more.hidden = true; };
  byId("answer").hidden = false;
  return drawLevels(answer, context.before);
}
