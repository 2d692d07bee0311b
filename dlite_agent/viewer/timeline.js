// The timeline of one session: lanes, overview and everything a pointer or the keyboard can do to them.

import { Axis, idleStretches } from "./axis.js";
import { $, fit, h, onceAFrame } from "./dom.js";
import { draw, forgetHatches, place } from "./draw.js";
import { seconds } from "./format.js";
import { whatIsAt } from "./hit.js";
import { layout, mostAccepted, mostTokens, placeTools, TOP } from "./lanes.js";
import { MINI_HEIGHT, paint, show } from "./mini.js";
import { MEANING } from "./phases.js";
import { Rounds } from "./rounds.js";

const CLOSEST = 2e-4;
const GAP = 4;  // between overview and lanes

export class Timeline {
  /** `on` has select(turn, callId) and moved(window). */
  constructor(box, on) {
    this.on = on;
    this.names = h("div", { className: "names", "aria-hidden": "true" });
    this.mini = h("canvas", { className: "mini" });
    this.plot = h("canvas", { className: "plot" });
    this.chosen = h("i", { className: "chosen", hidden: true });
    this.area = h("div", { className: "area" }, this.mini, this.plot, this.chosen);
    this.which = h("p", { className: "which", hidden: true });
    this.root = h(
      "div",
      {
        className: "lanes",
        tabindex: 0,
        role: "group",
        "aria-label": "Lanes of the session. Left and right move, plus and minus zoom, 0 shows all. The turns below say the same in words.",
      },
      this.which,
      this.names,
      this.area,
    );
    box.replaceChildren(this.root);
    this.view = null;
    this.window = [0, 1];
    this.selected = null;
    this.fold = true;
    this.now = null;
    this.extent = 0;
    this.painted = null;
    this.redraw = onceAFrame(() => this.paint());
    this.observer = new ResizeObserver(() => this.resized());
    this.observer.observe(this.area);
    this.pointers = new Map();
    this.listen();
  }

  destroy() {
    this.observer.disconnect();
    this.root.remove();
  }

  /** Shows a session; `keep` keeps the window, as for one that has grown. */
  show(view, ref, { keep = false, name = null, compact = false } = {}) {
    const whole = !keep || this.view === null || this.atAll();
    const following = keep && this.view !== null && this.window[1] >= this.length - 1e-9;
    const before = this.view === null ? null : [...this.window];
    this.view = view;
    if (!keep || this.rounds?.ref !== ref) this.rounds = new Rounds(ref, this.redraw);
    else this.rounds.forget();
    this.lanes = layout(view, compact);
    placeTools(view.turns);
    this.most = mostAccepted(view.turns);
    this.tokens = mostTokens(view.turns);
    this.which.hidden = name === null;
    this.which.textContent = name ?? "";
    this.names.replaceChildren(
      ...this.lanes.lanes.map((lane) => {
        const swatch = h("i", { className: "dot", style: { background: `var(--phase-${lane.id})` } });
        const label = h("span", { title: MEANING[lane.id] }, lane.strip ? null : swatch, lane.id);
        label.style.setProperty("top", `${MINI_HEIGHT + GAP + lane.y + lane.height / 2 - 8}px`);
        return label;
      }),
    );
    this.axis = new Axis(Math.max(view.wall, 1e-6), idleStretches(view), this.fold);
    if (whole) this.window = [0, this.length];
    else if (following) this.window = [before[0], this.length];
    this.painted = null;
    this.redraw();
  }

  setFold(fold) {
    const times = this.window.map((u) => this.axis.time(u));
    const all = this.atAll();
    this.fold = fold;
    this.axis = new Axis(Math.max(this.view.wall, 1e-6), idleStretches(this.view), fold);
    this.window = all ? [0, this.length] : times.map((t) => this.axis.unit(t));
    this.painted = null;
    this.moved();
  }

  /** Units that the whole width stands for: the session's, or those of the longer one it is compared with. */
  get length() {
    return Math.max(this.axis.length, this.extent);
  }

  setExtent(extent) {
    this.extent = extent;
    this.painted = null;
    this.all();
  }

  atAll() {
    return this.window[0] <= 1e-9 && this.window[1] >= this.length - 1e-9;
  }

  select(turn) {
    this.selected = turn;
    this.mark();
  }

  /** Marks the selected turn by an element of its own: selecting redraws no lane. */
  mark() {
    const turn = this.plan?.view.turns.find((item) => item.turn === this.selected);
    const { x } = turn ? place(this.plan) : {};
    const left = turn ? Math.max(x(turn.start), 0) : 0;
    const right = turn ? Math.min(Math.max(x(turn.window_end), x(turn.start) + 2), this.plan.width) : 0;
    this.chosen.hidden = right <= left;
    if (this.chosen.hidden) return;
    const style = { left, width: right - left, top: MINI_HEIGHT + GAP + TOP - 5, height: this.plan.height - TOP + 5 };
    for (const [name, value] of Object.entries(style)) this.chosen.style.setProperty(name, `${value}px`);
  }

  /** `since` is the time from which something runs that has no end yet, or null. */
  setNow(now) {
    if (now === null && this.now === null) return;
    this.now = now;
    this.redraw();
  }

  themed() {
    forgetHatches();
    this.painted = null;
    if (this.view) this.redraw();
  }

  resized() {
    this.painted = null;
    if (this.view) this.redraw();
  }

  paint() {
    const width = this.area.clientWidth;
    if (!this.view || width < 10) return;
    this.plot.style.setProperty("height", `${this.lanes.height}px`);
    this.mini.style.setProperty("height", `${MINI_HEIGHT}px`);
    this.plan = {
      view: this.view,
      axis: this.axis,
      window: this.window,
      lanes: this.lanes,
      most: this.most,
      tokens: this.tokens,
      rounds: this.rounds,
      now: this.now,
      width,
      height: this.lanes.height,
    };
    const drawn = draw(fit(this.plot, width, this.lanes.height), this.plan);
    this.plan.columns = drawn.columns;
    this.root.dataset.detail = drawn.columns ? "rounds" : "turns";
    if (!this.painted || this.paintedWidth !== width) {
      this.painted = paint(this.view, this.axis, width, this.length);
      this.paintedWidth = width;
    }
    show(this.mini, this.painted, this.length, this.window, width);
    this.mark();
  }

  // Moving.

  setWindow(u0, u1, tell = true) {
    const wide = Math.min(Math.max(u1 - u0, CLOSEST), this.length);
    const start = Math.min(Math.max(u0, 0), this.length - wide);
    this.window = [start, start + wide];
    if (tell) this.moved();
    else this.redraw();
  }

  moved() {
    this.redraw();
    this.on.moved?.(this.window, this);
  }

  zoom(factor, at = 0.5) {
    const [u0, u1] = this.window;
    const middle = u0 + (u1 - u0) * at;
    const wide = Math.min(Math.max((u1 - u0) * factor, CLOSEST), this.length);
    this.setWindow(middle - wide * at, middle + wide * (1 - at));
  }

  pan(share) {
    const wide = this.window[1] - this.window[0];
    this.setWindow(this.window[0] + wide * share, this.window[1] + wide * share);
  }

  all() {
    this.setWindow(0, this.length);
  }

  /** Zooms so that a turn fills most of the width. */
  toTurn(number) {
    const turn = this.view?.turns.find((item) => item.turn === number);
    if (!turn) return;
    const a = this.axis.unit(turn.start);
    const b = Math.max(this.axis.unit(Math.max(turn.end, ...turn.tools.map((call) => call.end))), a + CLOSEST);
    this.setWindow(a - (b - a) * 0.06, b + (b - a) * 0.06);
  }

  /** Moves, without zooming, so that a turn can be seen. */
  reveal(number) {
    const turn = this.view?.turns.find((item) => item.turn === number);
    if (!turn) return;
    const at = this.axis.unit(turn.start);
    const [u0, u1] = this.window;
    if (at < u0 || at > u1) this.setWindow(at - (u1 - u0) / 4, at + ((u1 - u0) * 3) / 4);
  }

  range() {
    return this.window.map((u) => this.axis.time(u));
  }

  // Listening.

  listen() {
    const at = (event, element) => {
      const box = element.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top, box.width];
    };
    this.plot.addEventListener(
      "wheel",
      (event) => {
        const [x, , width] = at(event, this.plot);
        event.preventDefault();
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
          this.pan((event.deltaX || event.deltaY) / width);
        } else this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), x / width);
      },
      { passive: false },
    );
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.plot.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, event.clientX);
      this.travelled = 0;
    });
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.view) return;
      if (this.pointers.has(event.pointerId)) this.dragged(event);
      else this.hover(event, ...at(event, this.plot));
    });
    const release = (event) => {
      this.pointers.delete(event.pointerId);
      this.plot.classList.remove("dragging");
    };
    this.plot.addEventListener("pointerup", (event) => {
      const click = this.pointers.has(event.pointerId) && this.travelled < 5;
      release(event);
      if (click && this.plan) this.clicked(...at(event, this.plot));
    });
    this.plot.addEventListener("pointercancel", release);
    this.plot.addEventListener("pointerleave", () => ($("tip").hidden = true));
    this.plot.addEventListener("dblclick", (event) => {
      const found = this.plan && whatIsAt(this.plan, ...at(event, this.plot));
      if (found?.turn) this.toTurn(found.turn.turn);
    });
    const jump = (event) => {
      const [x, , width] = at(event, this.mini);
      const wide = this.window[1] - this.window[0];
      const middle = (x / width) * this.length;
      this.setWindow(middle - wide / 2, middle + wide / 2);
    };
    this.mini.addEventListener("pointerdown", (event) => {
      this.mini.setPointerCapture(event.pointerId);
      jump(event);
    });
    this.mini.addEventListener("pointermove", (event) => event.buttons & 1 && jump(event));
    this.root.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const acts = {
        ArrowLeft: () => this.pan(-0.15),
        ArrowRight: () => this.pan(0.15),
        Home: () => this.setWindow(0, this.window[1] - this.window[0]),
        End: () => this.setWindow(this.length - (this.window[1] - this.window[0]), this.length),
      };
      if (!acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    });
  }

  dragged(event) {
    const before = this.pointers.get(event.pointerId);
    const width = this.area.clientWidth;
    if (this.pointers.size === 2) {
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      const factor = Math.abs(before - other) / Math.max(Math.abs(event.clientX - other), 8);
      const left = this.plot.getBoundingClientRect().left;
      this.zoom(factor, ((event.clientX + other) / 2 - left) / width);
    } else {
      this.travelled += Math.abs(event.clientX - before);
      if (this.travelled >= 5) {
        this.plot.classList.add("dragging");
        $("tip").hidden = true;
        this.pan((before - event.clientX) / width);
      }
    }
    this.pointers.set(event.pointerId, event.clientX);
  }

  hover(event, x, y) {
    const found = this.plan && whatIsAt(this.plan, x, y);
    const tip = $("tip");
    if (!found) {
      tip.hidden = true;
      return;
    }
    tip.textContent = found.text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
    tip.style.setProperty("left", `${Math.max(4, left)}px`);
    tip.style.setProperty("top", `${Math.min(event.clientY + 16, innerHeight - box.height - 6)}px`);
  }

  clicked(x, y) {
    const found = whatIsAt(this.plan, x, y) ?? whatIsAt(this.plan, x, 4);
    if (found?.turn) this.on.select?.(found.turn.turn, found.call ?? null);
  }

  describe() {
    const [start, end] = this.range();
    const folded = this.axis.folds.length ? `, ${this.axis.folds.length} idle folded` : "";
    return `${seconds(Math.max(end - start, 0))} of ${seconds(this.view.wall)}${folded}`;
  }

  /** Where a time is in pixels, for tests and marks. */
  pixel(t) {
    return place(this.plan).x(t);
  }
}
