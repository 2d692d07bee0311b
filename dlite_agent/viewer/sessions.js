// The list of sessions: live ones, opened files, and those shipped with the package.

import { get } from "./api.js";
import { $, colour, fit, h } from "./dom.js";
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
    for (const card of shown) this.spark(card);
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
      card.spark.length ? h("canvas", { role: "img", "aria-label": "decode, tool and other seconds by turn" }) : null,
    );
  }

  spark(card) {
    const button = this.list.querySelector(`[data-ref="${CSS.escape(card.ref)}"]`);
    const canvas = button?.querySelector("canvas");
    const width = canvas?.clientWidth ?? 0;
    if (width < 8) return;
    const context = fit(canvas, width, 20);
    const most = Math.max(...card.spark.map(([a, b, c]) => a + b + c), 1e-9);
    const step = Math.min(width / card.spark.length, 12);
    card.spark.forEach(([decode, tool, rest], i) => {
      let y = 20;
      const whole = Math.sqrt((decode + tool + rest) / most) * 19;
      for (const [value, name] of [[rest, "phase-prefill"], [decode, "phase-decode"], [tool, "phase-tool"]]) {
        const tall = (value / Math.max(decode + tool + rest, 1e-12)) * whole;
        context.fillStyle = colour(name);
        context.fillRect(i * step, y - tall, Math.max(step - 1, 1), tall);
        y -= tall;
      }
    });
  }
}
