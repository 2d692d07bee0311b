// What the lanes are made of for one session: their places, the tool calls' rows, and which turns a window touches.

import { LANES } from "./phases.js";

export const TOP = 22;
const GAP = 5;
const MOST_ROWS = 4;
const UNSEEN = 2e-3;

/** The session's lanes with their y, and the height of all; `compact` leaves out what two sessions have no room for. */
export function layout(view, compact = false) {
  let y = TOP;
  const lanes = [];
  const whole = Object.values(view.seconds).reduce((sum, value) => sum + value, 0);
  for (const lane of LANES) {
    if (!lane.always && !(view.seconds[lane.id] > whole * UNSEEN)) continue;
    if (compact && lane.spare) continue;
    lanes.push({ ...lane, y });
    y += lane.height + GAP;
  }
  return { lanes, height: y + 10, by: Object.fromEntries(lanes.map((lane) => [lane.id, lane])) };
}

/** Gives every tool call a `row` of the `rows` that its overlapping neighbours share, at most `MOST_ROWS`. */
export function placeTools(turns) {
  const calls = turns.flatMap((turn) => turn.tools).sort((a, b) => a.start - b.start);
  let free = [];
  let together = [];
  const close = () => {
    for (const call of together) call.rows = free.length;
    free = [];
    together = [];
  };
  for (const call of calls) {
    if (free.every((end) => end <= call.start + 1e-9)) close();
    let row = free.findIndex((end) => end <= call.start + 1e-9);
    if (row < 0) row = free.length < MOST_ROWS ? free.length : free.indexOf(Math.min(...free));
    free[row] = Math.max(free[row] ?? 0, call.end);
    call.row = row;
    together.push(call);
  }
  close();
}

/** Most drafts that any round accepted; the height of a strip. */
export function mostAccepted(turns) {
  let most = 1;
  for (const turn of turns) for (const advance of Object.keys(turn.advances)) most = Math.max(most, Number(advance) - 1);
  return most;
}

/** Most tokens the session held. */
export function mostTokens(turns) {
  return turns.reduce((most, turn) => Math.max(most, (turn.prompt_tokens ?? 0) + (turn.output_tokens ?? 0)), 0);
}

/** Index range [low, high) of the turns whose time, with the wait after them, touches [start, end]. */
export function turnsWithin(turns, start, end) {
  let low = 0;
  let high = turns.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (turns[middle].start <= start) low = middle + 1;
    else high = middle;
  }
  const first = Math.max(0, low - 1);
  let last = first;
  while (last < turns.length && turns[last].start <= end) last += 1;
  return [first, last];
}

/** How many rounds of these turns lie in [start, end], taking each turn's rounds as equally long. */
export function roundsExpected(turns, start, end) {
  let expected = 0;
  for (const turn of turns) {
    if (!turn.rounds) continue;
    const wide = Math.max(turn.last_round - turn.first_round, 1e-9);
    const common = Math.min(end, turn.last_round) - Math.max(start, turn.first_round);
    if (common > 0) expected += (turn.rounds * common) / wide;
  }
  return expected;
}

/** Mean seconds of a round over these turns; 0 without rounds. */
export function meanRound(turns) {
  let rounds = 0;
  let wide = 0;
  for (const turn of turns) {
    rounds += turn.rounds;
    if (turn.rounds) wide += turn.last_round - turn.first_round;
  }
  return rounds ? wide / rounds : 0;
}
