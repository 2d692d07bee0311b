// What lies under a pointer, in words.

import { place } from "./draw.js";
import { count, line, percent, seconds } from "./format.js";
import { TOP, turnsWithin } from "./lanes.js";
import { lowerBound } from "./rounds.js";
import { MEANING } from "./phases.js";

const NEAR = 3;

/** {turn, call, text} at a point of the lanes, or null. */
export function whatIsAt(plan, px, py) {
  const { axis, lanes, view } = plan;
  const { x, scale } = place(plan);
  const t = axis.time(plan.window[0] + px / scale);
  const fold = axis.folds.find((item) => x(item.start) - 1 <= px && px <= x(item.end) + 1);
  if (fold) return { turn: null, text: `${fold.phase}, folded: ${seconds(fold.end - fold.start)}\n${MEANING[fold.phase]}` };
  const [low, high] = turnsWithin(view.turns, t, t);
  const turn = view.turns.slice(low, high).findLast((item) => item.start <= t && t <= item.window_end);
  if (py < TOP) return turn ? { turn, text: head(turn) } : null;
  const lane = lanes.lanes.find((item) => py >= item.y - 2 && py <= item.y + item.height + 2);
  if (!lane) return null;
  if (lane.id === "tool") return toolAt(plan, view.turns.slice(Math.max(0, low - 2), high), px, py, x, lane) ?? fallback(plan, turn, lane, px, x);
  if (!turn) return null;
  if (lane.id === "context") return { turn, text: `${head(turn)}\n${contextOf(turn)}` };
  if (lane.id === "decode" || lane.id === "accepted") {
    return roundAt(plan, turn, t) ?? { turn, text: `${head(turn)}\n${decodeOf(turn)}` };
  }
  return fallback(plan, turn, lane, px, x);
}

function head(turn) {
  const cut = turn.divergences.map((item) => `\ndiverged: ${line(item.reason, 60)} at ${item.position}`).join("");
  const miss = turn.mismatches.map((item) => `\nreplay differs: ${item.what} at ${item.position}`).join("");
  return `Turn ${turn.turn}, ${seconds(turn.end - turn.start)}${turn.finished ? "" : ", not finished"}${cut}${miss}`;
}

function fallback(plan, turn, lane, px, x) {
  const bar = turn?.lanes.find(
    ([index, start, end]) => plan.view.phases[index] === lane.id && x(start) - NEAR <= px && px <= x(end) + NEAR,
  );
  if (!bar) return null;
  const tier = lane.id === "restore" ? turn.restores.map(restoreText).join("") : "";
  const inferred = bar[3] ? ", inferred" : "";
  const new_ = lane.id === "prefill" ? `\n${contextOf(turn)}` : "";
  return { turn, text: `Turn ${turn.turn}: ${lane.id} ${seconds(bar[2] - bar[1])}${inferred}\n${MEANING[lane.id]}${tier}${new_}` };
}

export function restoreText(item) {
  const of = item.wanted === null ? "" : ` of ${count(item.wanted)}`;
  return `\n${count(item.tokens)}${of} tokens from ${line(item.tier, 24)}${item.reason ? ` (${line(item.reason, 80)})` : ""}`;
}

function contextOf(turn) {
  if (turn.prompt_tokens === null) return "token counts were not recorded";
  const cached = turn.cached_tokens === null ? "" : `, ${percent(turn.cached_tokens / Math.max(turn.prompt_tokens, 1))} cached`;
  return `prompt ${count(turn.prompt_tokens)}${cached}, answer ${count(turn.output_tokens)} tokens`;
}

function decodeOf(turn) {
  if (!turn.rounds) return turn.seconds.model ? `model ${seconds(turn.seconds.model)}, not split by the log` : "no rounds";
  const means = turn.means;
  return (
    `decode ${seconds(turn.seconds.decode ?? 0)} in ${count(turn.rounds)} rounds (${turn.mode})\n` +
    `tau ${means.tau.toFixed(2)}, T_D ${seconds(means.t_d)}, T_V ${seconds(means.t_v)}, T_S ${seconds(means.t_s)}`
  );
}

function roundAt(plan, turn, t) {
  const columns = plan.columns;
  if (!columns) return null;
  const i = lowerBound(columns.start, t + 1e-12) - 1;
  if (i < 0 || t > columns.start[i] + columns.wall[i]) return null;
  return {
    turn,
    text:
      `Turn ${turn.turn}: ${columns.advance[i] - 1} of ${columns.drafted[i]} drafts accepted\n` +
      `draft ${seconds(columns.t_d[i])}, verify ${seconds(columns.t_v[i])}, rest ${seconds(columns.t_s[i])}\n` +
      `context ${count(columns.context[i])}, batch ${columns.batch[i]}`,
  };
}

function toolAt(plan, turns, px, py, x, lane) {
  let best = null;
  for (const turn of turns) {
    for (const call of turn.tools) {
      const tall = lane.height / call.rows;
      const top = lane.y + call.row * tall;
      if (py < top - 1 || py > top + tall + 1 || x(call.start) - NEAR > px || px > x(call.end) + NEAR) continue;
      if (!best || call.start >= best.call.start) best = { turn, call };
    }
  }
  if (!best) return null;
  const { turn, call } = best;
  return { turn, call: call.call_id, text: `Turn ${turn.turn}: ${callText(call)}` };
}

export function callText(call) {
  const known = call.measured ? "measured" : "inferred";
  const state = !call.finished ? ", no end recorded" : call.error ? `, ${line(call.error, 60)}` : call.exit_code === null ? "" : `, exit ${call.exit_code}`;
  const sandbox = call.sandbox ? `\nsandbox ${line(call.sandbox, 30)}` : "";
  return `${line(call.name, 60)} ${seconds(call.end - call.start)}, ${known}${state}${sandbox}`;
}
