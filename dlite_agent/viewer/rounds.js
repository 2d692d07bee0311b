// Rounds come by stretches of time, only when they are wide enough to be seen, and the latest stretches are kept.

import { get } from "./api.js";

const MOST = 6000;
const KEPT = 12;

export class Rounds {
  constructor(ref, onLoad) {
    this.ref = ref;
    this.onLoad = onLoad;
    this.stretches = [];
    this.pending = false;
    this.failed = 0;
  }

  forget() {
    this.stretches = [];
    this.failed = 0;
  }

  /** The stretch that covers [start, end], or null while it is fetched (or when it would be too many rounds). */
  between(start, end, expected) {
    const found = this.stretches.find((item) => item.start <= start && end <= item.end);
    if (found) return found;
    if (expected > 0 && expected <= MOST && !this.pending && this.failed < 3) this.load(start, end);
    return null;
  }

  async load(start, end) {
    this.pending = true;
    const wide = end - start;
    const wanted = { start: start - wide / 2, end: end + wide / 2 };
    try {
      const columns = await this.pages(wanted);
      this.stretches.unshift({ ...wanted, columns });
      this.stretches.length = Math.min(this.stretches.length, KEPT);
      this.failed = 0;
    } catch {
      this.failed += 1;
    }
    this.pending = false;
    this.onLoad();
  }

  async pages(wanted) {
    let columns = null;
    for (;;) {
      const offset = columns?.start.length ?? 0;
      const page = await get("rounds", { ref: this.ref, ...wanted, offset });
      if (columns === null) columns = page;
      else for (const name of Object.keys(columns)) if (Array.isArray(columns[name])) columns[name].push(...page[name]);
      if (page.count === 0 || columns.start.length >= Math.min(page.total, 3 * MOST)) return columns;
    }
  }
}

/** Index of the first value not below `t`. */
export function lowerBound(values, t) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < t) low = middle + 1;
    else high = middle;
  }
  return low;
}
