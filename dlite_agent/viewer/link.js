// Deep links: what is shown is in the address behind the #, and nothing secret ever is.

const NAMES = ["session", "turn", "with"];
const SETTLE = 120;  // milliseconds; browsers refuse hundreds of changes in a few seconds, as a held key would make
let timer = null;

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

/** Writes the address; another session is a step in the history, another turn is not, and is written once it settles. */
export function write(place) {
  clearTimeout(timer);
  const before = read();
  const parts = new URLSearchParams();
  for (const name of NAMES) if (place[name] !== null && place[name] !== undefined) parts.set(name, String(place[name]));
  const hash = parts.size ? `#${parts}` : location.pathname;
  if (hash === location.hash) return;
  if (before.session !== null && before.session !== (place.session ?? null)) history.pushState(null, "", hash);
  else timer = setTimeout(() => history.replaceState(null, "", hash), SETTLE);
}

/** `work(place)` when the address was changed by someone else. */
export function onChange(work) {
  const changed = () => {
    clearTimeout(timer);
    work(read());
  };
  window.addEventListener("popstate", changed);
  window.addEventListener("hashchange", changed);
}
