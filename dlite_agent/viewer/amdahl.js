// The arithmetic of trace/amdahl.py, operation by operation: the page and the report differ by rounding at most.

export const EXCLUDED = ["client", "outage"];

function check(f, sD) {
  if (!(f >= 0 && f <= 1)) throw new RangeError(`A share lies between 0 and 1, not ${f}.`);
  if (!(sD > 0)) throw new RangeError(`A speed-up is positive, not ${sD}.`);
}

/** 1 / ((1 - f) + f / sD) */
export function workflowSpeedup(f, sD) {
  check(f, sD);
  return 1 / (1 - f + f / sD);
}

/** 1 / (1 - f), infinite at f = 1. */
export function bound(f) {
  check(f, 1);
  return f === 1 ? Infinity : 1 / (1 - f);
}

/** S_D = tau * T_AR / seconds of a round. */
export function decodeSpeedup(tAr, tau, roundSeconds) {
  return (tau * tAr) / roundSeconds;
}

/** f of the autoregressive-equivalent time from the decode share of an accelerated timeline. */
export function shareBefore(fAccelerated, sD) {
  check(fAccelerated, sD);
  return (fAccelerated * sD) / (1 - fAccelerated + fAccelerated * sD);
}

function share(part, rest) {
  return part > 0 ? part / (part + rest) : 0;
}

function limit(part, rest) {
  return rest > 0 ? (part + rest) / rest : part > 0 ? Infinity : 1;
}

/**
 * The figures of `seconds` by phase and the autoregressive equivalent `ar` {seconds, error}; estimates are
 * [value, low, high]. The order of `seconds` is that of the phases, since sums of floats depend on it.
 */
export function analyse(seconds, ar) {
  const decode = seconds.decode ?? 0;
  let rest = 0;
  for (const [phase, value] of Object.entries(seconds)) {
    if (phase !== "decode" && !EXCLUDED.includes(phase)) rest += value;
  }
  const cases = [0, -1, 1].map((sign) => Math.max(0, ar.seconds + sign * ar.error));
  return {
    decode,
    rest,
    f: cases.map((a) => share(a, rest)),
    s_d: decode > 0 ? cases.map((a) => a / decode) : null,
    workflow: cases.map((a) => (decode + rest > 0 ? (a + rest) / (decode + rest) : 1)),
    bound: cases.map((a) => limit(a, rest)),
    decode_share: share(decode, rest),
    bound_from_here: limit(decode, rest),
  };
}

/**
 * The session with decoding `sD` times as fast as one by one and all tools taking `toolFactor` of their time.
 * `now` is the seconds that count as it ran, `then` those predicted.
 */
export function whatIf(seconds, ar, sD, toolFactor) {
  const changed = {};
  let now = 0;
  for (const [phase, value] of Object.entries(seconds)) {
    if (!EXCLUDED.includes(phase)) now += value;
    changed[phase] = phase === "decode" ? ar.seconds / sD : phase === "tool" ? value * toolFactor : value;
  }
  const figures = analyse(changed, ar);
  const then = figures.decode + figures.rest;
  return { ...figures, now, then, against_now: then > 0 ? now / then : 1 };
}
