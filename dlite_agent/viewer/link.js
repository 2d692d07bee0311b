// Deep links: what is shown is in the address behind the #, and nothing secret ever is.

const NAMES = ["session", "turn", "with"];

/** {session, turn, with}; turn is a number or null. */
export function read() {
  const found = new URLSearchParams(location.hash.slice(1));
  const turn = found.get("turn");
  return {
    session: found.get("session"),
    turn: turn !== null && /^\d{1,12}$/.test(turn) ? Number(turn) : null,
    with: found.get("with"),
  };
}

/** Writes the address; another session is a step in the history, another turn is not. */
export function write(place) {
  const before = read();
  const parts = new URLSearchParams();
  for (const name of NAMES) if (place[name] !== null && place[name] !== undefined) parts.set(name, String(place[name]));
  const hash = parts.size ? `#${parts}` : location.pathname;
  if (hash === location.hash) return;
  const step = before.session !== null && before.session !== (place.session ?? null);
  history[step ? "pushState" : "replaceState"](null, "", hash);
}

export function onChange(work) {
  window.addEventListener("popstate", () => work(read()));
  window.addEventListener("hashchange", () => work(read()));
}
