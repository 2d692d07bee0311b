// A session's view, read page by page, and kept up to date while it runs.

import { follow, get } from "./api.js";

const SOONEST = 400;

export async function readView(ref, signal) {
  const view = await get("session", { ref }, signal);
  await rest(view, ref, signal);
  view.received = performance.now();
  return view;
}

async function rest(view, ref, signal) {
  while (view.next_turn !== null) {
    const page = await get("session", { ref, from_turn: view.next_turn }, signal);
    view.turns.push(...page.turns);
    view.next_turn = page.next_turn;
  }
}

/** The view with what has come since: only the last turns travel again. */
export async function readMore(old, ref, signal) {
  const from = Math.max(0, old.turns.length - 2);
  const view = await get("session", { ref, from_turn: from }, signal);
  await rest(view, ref, signal);
  const steady = from === 0 || old.turns[from].turn === view.turns[0]?.turn;
  if (!steady) return readView(ref, signal);
  view.turns = [...old.turns.slice(0, from), ...view.turns];
  view.received = performance.now();
  return view;
}

/** Seconds on the session's axis now, for a session whose last event's age the server told; else null. */
export function nowOf(view) {
  if (view.age === null || !view.in_flight) return null;
  return view.wall + view.age + (performance.now() - view.received) / 1000;
}

/** Follows a live session until `signal` aborts: `on.changed()` when it is worth reading again, `on.state(connected)`. */
export async function stayLive(ref, on, signal) {
  let pause = 500;
  let timer = null;
  let spent = 0;
  const soon = () => {
    if (timer !== null) return;
    timer = setTimeout(async () => {
      timer = null;
      const begun = performance.now();
      await on.changed();
      spent = performance.now() - begun;
    }, Math.max(SOONEST, 3 * spent));
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  while (!signal.aborted) {
    try {
      on.state(true);
      await follow("live", { ref }, soon, signal);
      pause = 500;
    } catch (error) {
      if (signal.aborted || error.status === 404) return;
      if (error.status === 401) {
        on.state(false);
        return;
      }
    }
    on.state(false);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, 10_000);
    if (!signal.aborted) soon();
  }
}
