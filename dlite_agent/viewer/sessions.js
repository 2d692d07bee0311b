// The list of sessions: live ones, opened files, and those shipped with the package.

import { get } from "./api.js";
import { spark } from "./bars.js";
import { $, h } from "./dom.js";
import { line, plural, seconds } from "./format.js";

const PAGE = 40;
const EVERY = 4000;
const LABELS = {
  run: "Runs",
  live: "Sessions",
  stored: "Stored sessions",
  file: "Opened files",
  shipped: "Shipped recordings",
};

export class Sessions {
  /** `on` has choose(ref), failed(problem) and counted(total). */
  constructor(on) {
    this.on = on;
    this.list = $("sessions");
    this.cards = [];
    this.total = null;
    this.wanted = PAGE;
    this.current = null;
    this.second = null;
    $("more-sessions").addEventListener("click", () => {
      this.wanted += PAGE;
      this.load();
    });
    $("find").addEventListener("input", () => this.paint());
  }

  /** Reads the list now and then again, as long as the page is looked at. */
  start() {
    if (this.timer) return;
    this.timer = setInterval(() => {
      if (document.visibilityState === "visible" && !this.reading) this.load();
    }, EVERY);
  }

  /** Reads the list, after any reading that is under way; true when it could be read. */
  load() {
    this.queue = (this.queue ?? Promise.resolve()).then(() => this.read());
    return this.queue;
  }

  async read() {
    this.reading = true;
    try {
      const cards = [];
      let total = 0;
      for (let offset = 0; offset < this.wanted; offset += PAGE) {
        const page = await get("sessions", { offset, limit: PAGE });
        cards.push(...page.sessions);
        total = page.total;
        if (cards.length >= total) break;
      }
      const news = JSON.stringify(cards) !== JSON.stringify(this.cards) || total !== this.total;
      this.cards = cards;
      this.total = total;
      if (news) this.paint();  // else a click that has begun would lose its button
      this.on.counted?.(total);
      return true;
    } catch (error) {
      this.on.failed?.(error);
      return false;
    } finally {
      this.reading = false;
    }
  }

  mark(current, second) {
    this.current = current;
    this.second = second;
    this.paint();
  }

  name(ref) {
    const card = this.cards.find((item) => item.ref === ref);
    return card ? line(card.name, 60) : null;
  }

  paint() {
    const sought = $("find").value.trim().toLowerCase();
    const shown = this.cards.filter((card) => `${card.name} ${card.session ?? ""}`.toLowerCase().includes(sought));
    const items = [];
    let kind = null;
    const focused = document.activeElement?.dataset?.ref;
    for (const card of shown) {
      if (card.kind !== kind) items.push(h("li", { className: "label" }, LABELS[card.kind]));
      kind = card.kind;
      items.push(h("li", {}, this.card(card)));
    }
    this.list.replaceChildren(...items);
    if (focused) this.list.querySelector(`[data-ref="${CSS.escape(focused)}"]`)?.focus();
    const hint = $("side-hint");
    hint.hidden = this.total === null || shown.length > 0;
    hint.textContent = sought ? "No session is called that." : "No sessions yet. Send a request to this server, or drop a session file here.";
    $("more-sessions").hidden = this.total === null || this.cards.length >= this.total || sought !== "";
  }

  card(card) {
    const state = card.in_flight ? h("i", { className: "dot pulse", title: "a turn is running" }) : null;
    const wall = card.wall === null ? "" : ` · ${seconds(card.wall)}`;
    const facts = card.problem ? line(card.problem, 60) : plural(card.turns, "turn") + wall;
    return h(
      "button",
      {
        type: "button",
        className: `session ${card.ref === this.second ? "second" : ""}`,
        "data-ref": card.ref,
        "aria-current": card.ref === this.current ? "true" : null,
        title: line(card.session ?? card.name, 200),
        onclick: () => this.on.choose(card.ref),
      },
      h("span", { className: "name" }, line(card.name, 80)),
      h("span", {}, state),
      h("span", { className: "facts" }, facts),
      card.spark.length ? spark(card.spark) : null,
    );
  }
}
