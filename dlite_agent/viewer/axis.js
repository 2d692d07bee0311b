// The time axis: seconds of the session, with long idle stretches folded to a fixed width.

const FOLD_SHARE = 0.012;
const WHOLLY = 0.9;  // a bar of short pieces with work between them is no stretch of idle time

/** Stretches of [start, end] in which nobody works, from turns and gaps. */
export function idleStretches(view) {
  const names = view.phases;
  const found = [];
  const take = (bars) => {
    for (const [phase, start, end, , share] of bars) {
      if ((names[phase] === "client" || names[phase] === "outage") && share >= WHOLLY) found.push([start, end, names[phase]]);
    }
  };
  take(view.gaps);
  for (const turn of view.turns) take(turn.lanes);
  found.sort((a, b) => a[0] - b[0]);
  const merged = [];
  for (const piece of found) {
    const last = merged[merged.length - 1];
    if (last && piece[0] <= last[1] + 1e-9 && piece[2] === last[2]) last[1] = Math.max(last[1], piece[1]);
    else merged.push([...piece]);
  }
  return merged;
}

/** Maps seconds to units and back; units are seconds, except that a fold takes a fixed, small number of them. */
export class Axis {
  constructor(wall, idle, fold) {
    const resting = idle.reduce((sum, [start, end]) => sum + end - start, 0);
    const busy = Math.max(wall - resting, 0);
    const longest = Math.max(busy * 0.06, 1);
    this.wall = wall;
    this.folds = [];
    const width = Math.max(busy * FOLD_SHARE, 1e-6);
    let saved = 0;
    for (const [start, end, phase] of fold ? idle : []) {
      if (end - start <= longest) continue;
      this.folds.push({ start, end, phase, u0: start - saved, u1: start - saved + width });
      saved += end - start - width;
    }
    this.length = Math.max(wall - saved, 1e-6);
  }

  /** Units of a time. */
  unit(t) {
    const folds = this.folds;
    let low = 0;
    let high = folds.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (folds[middle].start <= t) low = middle + 1;
      else high = middle;
    }
    if (low === 0) return t;
    const fold = folds[low - 1];
    if (t < fold.end) return fold.u0 + ((t - fold.start) / (fold.end - fold.start)) * (fold.u1 - fold.u0);
    return fold.u1 + (t - fold.end);
  }

  /** The time at a unit. */
  time(u) {
    const folds = this.folds;
    let low = 0;
    let high = folds.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (folds[middle].u0 <= u) low = middle + 1;
      else high = middle;
    }
    if (low === 0) return u;
    const fold = folds[low - 1];
    if (u < fold.u1) return fold.start + ((u - fold.u0) / (fold.u1 - fold.u0)) * (fold.end - fold.start);
    return fold.end + (u - fold.u1);
  }
}

/** Round steps for ticks: about one every `space` pixels. */
export function tickStep(secondsPerPixel, space = 90) {
  const wanted = secondsPerPixel * space;
  const power = 10 ** Math.floor(Math.log10(wanted));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= wanted * 0.999) return factor * power;
  return 10 * power;
}
