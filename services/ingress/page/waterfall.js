// Draws the stages of one answer as bars on a common time axis.

import { byId, ms, redraw, svg } from "./dom.js";

const ROW = 25;
const HEAD = 20;
const NAME = 128;
const TIME = 72;

function ticksOf(total) {
  const rough = total / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? rough;
  const ticks = [];
  for (let tick = 0; tick <= total * 1.0001; tick += step) ticks.push(tick);
  return ticks;
}

/**
 * @param stages [{name, start_ms, duration_ms, compute_ms, critical}]
 * @param totalMs length of the axis, milliseconds
 */
export function drawWaterfall(stages, totalMs) {
  const drawing = byId("waterfall");
  const width = Math.max(drawing.parentElement.clientWidth, 280);
  const height = HEAD + stages.length * ROW + 4;
  const end = Math.max(totalMs, ...stages.map((stage) => stage.start_ms + stage.duration_ms), 0.001);
  const scale = (width - NAME - TIME) / end;
  const nodes = [];
  for (const tick of ticksOf(end)) {
    const x = NAME + tick * scale;
    nodes.push(svg("line", { class: "grid", x1: x, x2: x, y1: HEAD - 4, y2: height }));
    nodes.push(svg("text", { class: "axis", x, y: 11, "text-anchor": "middle" }, tick === 0 ? "0" : `${Number(tick.toPrecision(3))} ms`));
  }
  stages.forEach((stage, index) => {
    const y = HEAD + index * ROW;
    const x = NAME + stage.start_ms * scale;
    const bar = Math.max(stage.duration_ms * scale, 2);
    const hint = `${stage.name}: from ${ms(stage.start_ms)} for ${ms(stage.duration_ms)}${stage.compute_ms === null ? "" : `, computing ${ms(stage.compute_ms)}`}${stage.critical ? ", on the critical path" : ""}`;
    nodes.push(svg("g", {},
      svg("title", {}, hint),
      svg("text", { x: 0, y: y + 16 }, stage.name),
      svg("rect", { class: `bar${stage.critical ? " critical" : ""}`, x, y: y + 4, width: bar, height: 15, rx: 2 }),
      stage.compute_ms ? svg("rect", { class: "compute", x, y: y + 15.5, width: Math.min(stage.compute_ms * scale, bar), height: 3.5 }) : null,
      svg("text", { class: stage.critical ? "critical-ms" : "ms", x: width, y: y + 16, "text-anchor": "end" }, ms(stage.duration_ms))));
  });
  drawing.setAttribute("height", height);
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  redraw(drawing, nodes);
  const critical = stages.filter((stage) => stage.critical).map((stage) => `${stage.name} ${ms(stage.duration_ms)}`);
  byId("waterfall-desc").textContent = `Total ${ms(totalMs)}. Critical path: ${critical.join(", then ")}. Stages: ${stages.map((stage) => `${stage.name} ${ms(stage.duration_ms)}`).join(", ")}.`;
}
