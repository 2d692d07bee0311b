// Draws the lanes of one session into a canvas. A plan says what is shown:
// {view, axis, window: [u0, u1], lanes, most, tokens, rounds, now, width, height}

import { tickStep } from "./axis.js";
import { colour } from "./dom.js";
import { count, line, seconds } from "./format.js";
import { meanRound, roundsExpected, TOP, turnsWithin } from "./lanes.js";
import { PARTS } from "./phases.js";
import { lowerBound } from "./rounds.js";

const DETAIL_PIXELS = 1.6;
const SMALL = "10px system-ui, sans-serif";
const hatches = new Map();

function hatch(context, paint) {
  let pattern = hatches.get(paint);
  if (!pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.globalAlpha = 0.28;
    pen.fillStyle = paint;
    pen.fillRect(0, 0, 6, 6);
    pen.globalAlpha = 1;
    pen.strokeStyle = paint;
    pen.lineWidth = 1.2;
    pen.beginPath();
    for (const shift of [-3, 0, 3]) {
      pen.moveTo(shift, 6 - shift - 3);
      pen.lineTo(shift + 6, -shift - 3);
    }
    pen.moveTo(-1, 1);
    pen.lineTo(1, -1);
    pen.moveTo(0, 6);
    pen.lineTo(6, 0);
    pen.moveTo(5, 7);
    pen.lineTo(7, 5);
    pen.stroke();
    pattern = context.createPattern(tile, "repeat");
    hatches.set(paint, pattern);
  }
  return pattern;
}

/** Pixels of a time. */
export function place(plan) {
  const [u0, u1] = plan.window;
  const scale = plan.width / (u1 - u0);
  return { x: (t) => (plan.axis.unit(t) - u0) * scale, scale };
}

/** Draws; returns what a pointer may want to know: whether rounds are shown singly, and their columns. */
export function draw(context, plan) {
  const { view, axis, window: [u0, u1], lanes, width } = plan;
  const { x, scale } = place(plan);
  const t0 = axis.time(u0);
  const t1 = axis.time(u1);
  const [low, high] = turnsWithin(view.turns, t0, t1);
  const turns = view.turns.slice(low, high);

  context.font = SMALL;
  context.textBaseline = "middle";
  for (const lane of lanes.lanes) {
    context.fillStyle = colour("raised");
    context.fillRect(0, lane.y, width, lane.height);
  }
  turnMarks(context, plan, turns, x);
  ticks(context, plan, x, t0, t1, scale);

  const mean = meanRound(turns);
  const single = mean * scale >= DETAIL_PIXELS;
  const stretch = single ? plan.rounds.between(t0, t1, roundsExpected(turns, t0, t1)) : null;
  for (const turn of turns) bars(context, plan, turn.lanes, x, stretch !== null && turn.rounds > 0);
  bars(context, plan, view.gaps, x, false);
  if (stretch) rounds(context, plan, stretch.columns, x, t0, t1);
  else for (const turn of turns) strip(context, plan, turn, x);
  for (const turn of turns) {
    tools(context, plan, turn, x);
    tiers(context, plan, turn, x);
  }
  contextLine(context, plan, turns, x);
  firstTokens(context, plan, turns, x, scale);
  folds(context, plan, x, u0, u1);
  if (plan.now !== null) running(context, plan, x);
  return { columns: stretch?.columns ?? null };
}

function ticks(context, plan, x, t0, t1, scale) {
  const step = tickStep(1 / scale);
  context.fillStyle = colour("muted");
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  let last = -Infinity;
  let t = Math.ceil(t0 / step) * step;
  for (let guard = 0; t <= t1 && guard < 400; guard += 1, t += step) {
    const fold = plan.axis.folds.find((item) => item.start < t && t < item.end);
    if (fold) {
      t = Math.ceil(fold.end / step) * step - step;
      continue;
    }
    const at = Math.round(x(t)) + 0.5;
    if (at - last < 44) continue;
    last = at;
    context.beginPath();
    context.moveTo(at, TOP - 5);
    context.lineTo(at, plan.height - 4);
    context.stroke();
    const text = clock(t, step);
    if (at > 2 && at + 3 + context.measureText(text).width < plan.width) context.fillText(text, at + 3, 8);
  }
}

function clock(t, step) {
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  if (step < 60 && t < 120) return `${t.toFixed(digits)} s`;
  const whole = Math.floor(t / 60);
  const rest = (t % 60).toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
  if (whole < 60) return `${whole}:${rest}`;
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}:${rest}`;
}

function turnMarks(context, plan, turns, x) {
  let last = -Infinity;
  for (const turn of turns) {
    const left = x(turn.start);
    const right = x(turn.window_end);
    if (turn.divergences.length || turn.mismatches.length) {
      context.fillStyle = colour(turn.mismatches.length ? "bad" : "warn");
      context.beginPath();
      context.moveTo(left, TOP - 9);
      context.lineTo(left + 4, TOP - 5);
      context.lineTo(left, TOP - 1);
      context.lineTo(left - 4, TOP - 5);
      context.fill();
    }
    if (left - last > 26 && right - left > 20 && left > -right) {
      context.fillStyle = colour("muted");
      context.fillText(`#${turn.turn}`, Math.max(left, 0) + 3, plan.height - 7);
      last = left;
    }
  }
}

function bars(context, plan, pieces, x, roundsShown) {
  const { lanes, view, width } = plan;
  for (const [index, start, end, inferred, share] of pieces) {
    const phase = view.phases[index];
    const lane = lanes.by[phase === "mask" ? "decode" : phase];
    if (phase === "outage" || phase === "tool" || !lane) continue;
    if (roundsShown && phase === "decode") continue;
    const left = Math.max(x(start), -2);
    const right = Math.min(x(end), width + 2);
    if (right < 0 || left > width) continue;
    const paint = colour(`phase-${phase}`);
    context.fillStyle = inferred ? hatch(context, paint) : paint;
    // A bar of many pieces is only as tall as the share of it that they fill.
    const tall = Math.max(lane.height * share, 1.5);
    context.fillRect(left, phase === "mask" ? lane.y : lane.y + lane.height - tall, Math.max(right - left, 1), tall);
  }
}

function rounds(context, plan, columns, x, t0, t1) {
  const lane = plan.lanes.by.decode;
  const row = plan.lanes.by.accepted;
  const paints = PARTS.map((part) => colour(`part-${part}`));
  const accepted = colour("phase-decode");
  const text = colour("text");
  const first = Math.max(0, lowerBound(columns.start, t0) - 1);
  for (let i = first; i < columns.start.length && columns.start[i] <= t1; i += 1) {
    const start = columns.start[i];
    const end = start + columns.wall[i];
    const drafted = Math.min(start + columns.t_d[i], end);
    const verified = Math.min(drafted + columns.t_v[i], end);
    const edges = [start, drafted, verified, end].map(x);
    const gap = edges[3] - edges[0] > 5 ? 1 : 0;
    for (let part = 0; part < 3; part += 1) {
      const wide = edges[part + 1] - edges[part] - (part === 2 ? gap : 0);
      if (wide <= 0) continue;
      context.fillStyle = paints[part];
      context.fillRect(edges[part], lane.y, wide, lane.height);
    }
    const tall = ((columns.advance[i] - 1) / plan.most) * (row.height - 2);
    const wide = Math.max(edges[3] - edges[0] - gap, 1);
    context.fillStyle = accepted;
    context.fillRect(edges[0], row.y + row.height - Math.max(tall, 1), wide, Math.max(tall, 1));
    if (wide > 14) {
      const top = row.y + row.height - tall - 6;
      const inside = top < row.y + 6;
      context.fillStyle = inside ? colour("panel") : text;
      context.fillText(String(columns.advance[i] - 1), edges[0] + wide / 2 - 3, inside ? top + 13 : top);
    }
  }
}

function strip(context, plan, turn, x) {
  if (!turn.rounds) return;
  const row = plan.lanes.by.accepted;
  const left = x(turn.first_round);
  const wide = Math.max(x(turn.last_round) - left, 1);
  if (left > plan.width || left + wide < 0) return;
  context.fillStyle = colour("phase-decode");
  const bins = Math.max(1, Math.min(turn.strip.length, Math.floor(wide)));
  for (let i = 0; i < bins; i += 1) {
    const from = Math.floor((turn.strip.length * i) / bins);
    const to = Math.max(from + 1, Math.floor((turn.strip.length * (i + 1)) / bins));
    let sum = 0;
    for (let k = from; k < to; k += 1) sum += turn.strip[k];
    const tall = Math.max((sum / (to - from) / plan.most) * (row.height - 2), 1);
    context.fillRect(left + (wide * i) / bins, row.y + row.height - tall, Math.max(wide / bins, 1), tall);
  }
}

function tools(context, plan, turn, x) {
  const lane = plan.lanes.by.tool;
  for (const call of turn.tools) {
    const tall = lane.height / call.rows;
    const left = x(call.start);
    const wide = Math.max(x(call.end) - left, 1.5);
    if (left > plan.width || left + wide < 0) continue;
    const paint = colour("phase-tool");
    const y = lane.y + call.row * tall;
    context.fillStyle = call.measured ? paint : hatch(context, paint);
    context.fillRect(left, y, wide, tall - (call.rows > 1 ? 1 : 0));
    if (failed(call)) {
      context.fillStyle = colour("bad");
      context.fillRect(left, y, Math.max(Math.min(wide, 3), 1.5), tall - (call.rows > 1 ? 1 : 0));
    }
    if (wide > 46 && tall >= 11) label(context, line(call.name, 40), left + 5, y + tall / 2, wide - 8, call.measured);
  }
  for (const [index, start, end] of turn.lanes) {
    // A wait that ends in no recorded call: a turn asked for tools that nobody measured.
    if (plan.view.phases[index] !== "tool" || turn.tools.length) continue;
    context.fillStyle = hatch(context, colour("phase-tool"));
    context.fillRect(x(start), lane.y, Math.max(x(end) - x(start), 1), lane.height);
  }
}

export function failed(call) {
  return Boolean(call.error) || (call.exit_code !== null && call.exit_code !== 0);
}

function label(context, text, left, y, room, onColour) {
  if (context.measureText(text).width > room) return;
  context.fillStyle = onColour ? colour("panel") : colour("text");
  context.fillText(text, left, y);
}

function tiers(context, plan, turn, x) {
  const lane = plan.lanes.by.restore;
  const bar = turn.lanes.find(([index]) => plan.view.phases[index] === "restore");
  if (!bar || !turn.restores.length) return;
  const left = x(bar[1]);
  const wide = x(bar[2]) - left;
  if (wide > 30) label(context, line(turn.restores[0].tier, 16), left + 4, lane.y + lane.height / 2, wide - 6, true);
}

function contextLine(context, plan, turns, x) {
  const lane = plan.lanes.by.context;
  if (!lane || !plan.tokens || !turns.length) return;
  const y = (tokens) => lane.y + lane.height - (tokens / plan.tokens) * (lane.height - 3);
  const points = [];
  for (const turn of turns) {
    if (turn.prompt_tokens === null) continue;
    const after = turn.prompt_tokens + (turn.output_tokens ?? 0);
    const begin = turn.first_round ?? turn.start;
    points.push([x(turn.start), y(turn.prompt_tokens)], [x(begin), y(turn.prompt_tokens)]);
    points.push([x(turn.end), y(after)], [x(turn.window_end), y(after)]);
  }
  if (!points.length) return;
  context.beginPath();
  context.moveTo(points[0][0], lane.y + lane.height);
  for (const [px, py] of points) context.lineTo(px, py);
  context.lineTo(points[points.length - 1][0], lane.y + lane.height);
  context.fillStyle = colour("accent-soft");
  context.fill();
  context.beginPath();
  points.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.25;
  context.stroke();
  context.fillStyle = colour("muted");
  context.fillText(count(plan.tokens), 3, lane.y + 7);
}

function firstTokens(context, plan, turns, x, scale) {
  const top = plan.lanes.by.prefill.y;
  const bottom = plan.lanes.by.decode.y + plan.lanes.by.decode.height;
  context.strokeStyle = context.fillStyle = colour("text");
  context.lineWidth = 1;
  let last = -Infinity;
  for (const turn of turns) {
    if (turn.ttft === null || (turn.end - turn.start) * scale < 14) continue;
    const at = x(turn.start + turn.ttft);
    if (at < -1 || at > plan.width + 1 || at - last < 3) continue;
    last = at;
    context.beginPath();
    context.moveTo(at, top);
    context.lineTo(at, bottom);
    context.stroke();
    context.beginPath();
    context.moveTo(at - 3, top);
    context.lineTo(at + 3, top);
    context.lineTo(at, top + 4);
    context.fill();
    if ((turn.end - turn.start - turn.ttft) * scale > 90) context.fillText(`TTFT ${seconds(turn.ttft)}`, at + 5, top + 9);
  }
}

function folds(context, plan, x, u0, u1) {
  for (const fold of plan.axis.folds) {
    if (fold.u1 < u0 || fold.u0 > u1) continue;
    const left = x(fold.start);
    const wide = Math.max(x(fold.end) - left, 2);
    const paint = colour(`phase-${fold.phase}`);
    context.fillStyle = colour("panel");
    context.fillRect(left, TOP - 4, wide, plan.height - TOP);
    context.fillStyle = hatch(context, paint);
    context.fillRect(left, TOP - 4, wide, plan.height - TOP - 6);
    const text = `${seconds(fold.end - fold.start)} ${fold.phase === "outage" ? "down" : "idle"}`;
    if (wide > 14) {
      const room = context.measureText(text).width + 8;
      context.save();
      context.translate(left + wide / 2, (TOP + plan.height) / 2);
      context.rotate(-Math.PI / 2);
      context.fillStyle = colour("panel");
      context.fillRect(-room / 2, -7, room, 14);
      context.fillStyle = colour("text");
      context.fillText(text, -room / 2 + 4, 0);
      context.restore();
    }
  }
  for (const [index, start, end] of plan.view.gaps) {
    if (plan.view.phases[index] !== "outage" || plan.axis.folds.some((fold) => fold.start <= start && end <= fold.end)) continue;
    context.fillStyle = hatch(context, colour("phase-outage"));
    context.fillRect(x(start), TOP - 4, Math.max(x(end) - x(start), 2), plan.height - TOP - 6);
  }
}

function running(context, plan, x) {
  const lane = plan.lanes.by.decode;
  const left = x(Math.min(plan.now.since, plan.axis.wall));
  const right = plan.width;
  if (left > right) return;
  context.fillStyle = hatch(context, colour("good"));
  context.fillRect(left, lane.y + 6, Math.max(right - left, 3), lane.height - 12);
  if (right - left > 60) label(context, "running", left + 6, lane.y + lane.height / 2, right - left - 8, false);
}

/** Patterns are made of colours, so they go with them. */
export function forgetHatches() {
  hatches.clear();
}
