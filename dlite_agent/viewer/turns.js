// The turns as a list of which only the visible part exists: 300 turns or 30,000 cost the same.

import { stack, strip, work } from "./bars.js";
import { h, onceAFrame, say } from "./dom.js";
import { count, decimal, line, percent, plural, seconds, times } from "./format.js";
import { failed } from "./draw.js";

const COLUMNS = ["turn", "where the time went", "seconds", "accepted", "tau", "context", ""];
const PAIR_COLUMNS = ["turn", "first above, second below", "first", "second", "ratio"];
const narrow = window.matchMedia("(max-width: 760px)");
const belowEachOther = window.matchMedia("(max-width: 1180px)");

export class TurnList {
  constructor(box, headBox, onSelect) {
    this.box = box;
    this.headBox = headBox;
    this.onSelect = onSelect;
    this.rows = [];
    this.live = new Map();
    this.selected = null;
    this.filler = h("div", { className: "filler", role: "presentation" });
    this.box.replaceChildren(this.filler);
    this.update = onceAFrame(() => this.paint());
    this.box.addEventListener("scroll", this.update, { passive: true });
    new ResizeObserver(() => this.refresh()).observe(this.box);
    this.box.addEventListener("click", (event) => {
      // By place, not by element: the row may have been drawn anew since the button went down.
      const y = event.clientY - this.box.getBoundingClientRect().top + this.box.scrollTop;
      const turn = this.rows[Math.floor(y / this.height)];
      if (turn) this.choose(turn.turn);
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  get height() {
    return narrow.matches ? 62 : 36;
  }

  /** `others` is a second session's turns by number, or null. */
  show(view, others = null) {
    this.view = view;
    this.others = others;
    this.rows = view.turns;
    this.most = Math.max(1, ...this.rows.map((turn) => Math.max(...Object.keys(turn.advances).map(Number), 1) - 1));
    this.tokens = Math.max(1, ...this.rows.map((turn) => (turn.prompt_tokens ?? 0) + (turn.output_tokens ?? 0)));
    this.longest = Math.max(1e-9, ...this.rows.map(work), ...(others ? [...others.values()].map(work) : []));
    const names = others ? PAIR_COLUMNS : COLUMNS;
    this.headBox.classList.toggle("pair", others !== null);
    this.headBox.replaceChildren(
      ...names.map((name, i) => {
        const wideOnly = i > 2;
        const right = others ? i >= 2 : [2, 4, 5].includes(i);
        return h("span", { className: `${right ? "num" : ""} ${wideOnly ? "wide-only" : ""}` }, name);
      }),
    );
    this.refresh();
  }

  refresh() {
    for (const row of this.live.values()) row.remove();
    this.live.clear();
    this.filler.style.setProperty("height", `${this.rows.length * this.height}px`);
    this.box.parentElement.style.setProperty("--rows", `${this.rows.length * this.height}px`);
    this.update();
  }

  select(number, { reveal = true } = {}) {
    this.selected = number;
    const index = this.rows.findIndex((turn) => turn.turn === number);
    if (index >= 0 && reveal) {
      const top = index * this.height;
      const room = this.box.clientHeight;
      if (top < this.box.scrollTop) this.box.scrollTop = top;
      else if (top + this.height > this.box.scrollTop + room) this.box.scrollTop = top + this.height - room;
    }
    for (const [i, row] of this.live) row.setAttribute("aria-selected", String(this.rows[i]?.turn === number));
    if (index >= 0) this.box.setAttribute("aria-activedescendant", `turn-${index}`);
    else this.box.removeAttribute("aria-activedescendant");
    this.update();
  }

  choose(number) {
    const turn = this.rows.find((item) => item.turn === number);
    if (turn) say(words(turn));
    this.onSelect(number);
    if (belowEachOther.matches) document.querySelector(".detail").scrollIntoView();
  }

  step(by) {
    if (!this.rows.length) return;
    const index = this.rows.findIndex((turn) => turn.turn === this.selected);
    const from = index >= 0 ? index : by > 0 ? -1 : this.rows.length;
    const next = Math.min(Math.max(from + by, 0), this.rows.length - 1);
    this.choose(this.rows[next].turn);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.height) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.step(by);
  }

  paint() {
    if (!this.view) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.height) - 4);
    const last = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / this.height) + 4);
    for (const [index, row] of this.live) {
      if (index < first || index >= last) {
        row.remove();
        this.live.delete(index);
      }
    }
    for (let i = first; i < last; i += 1) {
      if (this.live.has(i)) continue;
      const row = this.others ? this.pair(i) : this.row(i);
      this.live.set(i, row);
      this.box.append(row);
    }
  }

  shell(index, extra, ...cells) {
    const turn = this.rows[index];
    const row = h(
      "div",
      {
        className: `turn ${extra} ${turn.error ? "failed" : ""}`,
        id: `turn-${index}`,
        role: "option",
        "data-turn": turn.turn,
        "aria-selected": String(turn.turn === this.selected),
        "aria-setsize": this.rows.length,
        "aria-posinset": index + 1,
        "aria-label": words(turn),
      },
      ...cells,
    );
    row.style.setProperty("transform", `translateY(${index * this.height}px)`);
    return row;
  }

  row(index) {
    const turn = this.rows[index];
    const context = turn.prompt_tokens === null ? "–" : count(turn.prompt_tokens + (turn.output_tokens ?? 0));
    return this.shell(
      index,
      "",
      h("span", { className: "no", title: turn.trigger ? `triggered by ${turn.trigger}` : "" }, `#${turn.turn}`),
      h("div", { className: "time" }, stack(turn, this.longest)),
      h("span", { className: "num" }, seconds(turn.end - turn.start)),
      h("div", { className: "acc wide-only" }, strip(turn.strip, this.most)),
      h("span", { className: "num wide-only" }, turn.means ? decimal(turn.means.tau) : "–"),
      h("span", { className: "num wide-only" }, context),
      h("span", { className: "badges" }, ...badges(turn)),
    );
  }

  pair(index) {
    const turn = this.rows[index];
    const other = this.others.get(turn.turn);
    const [a, b] = [work(turn), other ? work(other) : null];
    return this.shell(
      index,
      "pair",
      h("span", { className: "no" }, `#${turn.turn}`),
      h("div", { className: "time" }, stack(turn, this.longest), other ? stack(other, this.longest) : null),
      h("span", { className: "num" }, seconds(a)),
      h("span", { className: "num wide-only" }, b === null ? "–" : seconds(b)),
      h("span", { className: "num wide-only" }, b > 0 ? times(a / b) : "–"),
    );
  }
}

/** What is worth a word: how the turn was restored, what it called, and what went wrong. */
export function badges(turn) {
  const found = [];
  if (turn.error) found.push(badge("bad", line(turn.error, 24), "the turn failed"));
  if (turn.divergences.length) {
    const [cut] = turn.divergences;
    found.push(badge("warn", `◆ ${line(cut.reason, 18)}`, `history diverged at token ${cut.position}`));
  }
  if (turn.mismatches.length) found.push(badge("bad", `◆ ${turn.mismatches.length} differ`, "the replay gave something else"));
  if (turn.tools.some(failed)) found.push(badge("bad", "tool failed", "a tool ended with an error or a non-zero exit"));
  const [restore] = turn.restores;
  if (restore && (restore.tier !== "none" || restore.reason)) {
    found.push(badge("accent", line(restore.tier, 12), "tier the session's state came from"));
  }
  if (turn.cached_tokens !== null && turn.prompt_tokens) {
    const share = turn.cached_tokens / turn.prompt_tokens;
    found.push(badge(share >= 0.8 ? "good" : share > 0 ? "" : "warn", `${Math.floor(100 * share)} % cached`, "share of the prompt that needed no prefill"));
  }
  const names = new Map();
  for (const call of turn.tools) names.set(call.name, (names.get(call.name) ?? 0) + 1);
  for (const [name, n] of [...names].slice(0, 2)) found.push(badge("", n > 1 ? `${line(name, 16)} ×${n}` : line(name, 18), "tool"));
  const sandbox = turn.tools.find((call) => call.sandbox)?.sandbox;
  if (sandbox) found.push(badge("", `▢ ${line(sandbox, 12)}`, "sandbox level of the tools"));
  return found;
}

function badge(kind, text, title) {
  return h("span", { className: `badge ${kind}`, title }, text);
}

/** A turn in a sentence, for those who cannot see the bars. */
export function words(turn) {
  const whole = work(turn);
  const parts = Object.entries(turn.seconds)
    .filter(([phase]) => phase !== "client" && phase !== "outage")
    .sort((a, b) => b[1] - a[1])
    .slice(0, 3)
    .map(([phase, value]) => `${phase} ${percent(whole > 0 ? value / whole : 0)}`);
  const calls = turn.tools.length ? `, ${plural(turn.tools.length, "tool call")}` : "";
  const state = turn.error ? ", failed" : turn.finished ? "" : ", running";
  return `Turn ${turn.turn}, ${seconds(whole)}: ${parts.join(", ")}${calls}${state}`;
}
