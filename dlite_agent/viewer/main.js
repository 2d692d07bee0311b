// The page: one place holds what is shown, and everything else is told of it.

import { Problem } from "./api.js";
import { showVersus } from "./compare.js";
import { nowOf, readMore, readView, stayLive } from "./data.js";
import { $, h } from "./dom.js";
import { acceptFiles } from "./files.js";
import { line } from "./format.js";
import { showHead } from "./head.js";
import { askKey, buildHelp } from "./help.js";
import { Inspector } from "./inspector.js";
import { bindKeys } from "./keys.js";
import * as link from "./link.js";
import { AmdahlPanel } from "./panel.js";
import { Sessions } from "./sessions.js";
import { Tabs } from "./tabs.js";
import * as theme from "./theme.js";
import { Timeline } from "./timeline.js";
import { TurnList } from "./turns.js";

class Page {
  constructor() {
    this.place = { session: null, turn: null, with: null };
    this.view = null;
    this.other = null;
    this.picking = false;
    this.live = null;
    this.loading = null;
    this.sessions = new Sessions({
      choose: (ref) => this.chosen(ref),
      failed: (error) => this.listFailed(error),
      counted: (total) => this.counted(total),
    });
    this.times = new Timeline($("times"), {
      select: (turn, call) => this.select(turn, call),
      moved: (window) => this.windowMoved(window, this.times),
    });
    this.timesB = null;
    this.turns = new TurnList($("turns"), $("turn-head"), (turn) => this.select(turn));
    this.inspector = new Inspector($("inspector"), (by) => this.turns.step(by));
    this.panel = new AmdahlPanel($("amdahl"));
    this.tabs = new Tabs(["amdahl", "inspector", "versus"]);
    this.wire();
  }

  wire() {
    theme.start();
    theme.onChange(() => this.themed());
    buildHelp();
    bindKeys(this);
    link.onChange((place) => this.go(place, { write: false }));
    acceptFiles({
      reading: (name) => this.stateLoading(`Reading ${line(name, 80)}`),
      opened: (refs) => this.opened(refs),
      failed: (error) => this.stateProblem("This file cannot be shown", error),
    });
    $("theme").addEventListener("click", theme.toggle);
    $("help").addEventListener("click", () => $("help-dialog").showModal());
    $("key").addEventListener("click", () => this.askKey(null));
    $("compare").addEventListener("click", () => this.toggleCompare());
    $("zoom-in").addEventListener("click", () => this.times.zoom(0.6));
    $("zoom-out").addEventListener("click", () => this.times.zoom(1 / 0.6));
    $("zoom-all").addEventListener("click", () => this.times.all());
    $("zoom-turn").addEventListener("click", () => this.zoomToTurn());
    $("fold").addEventListener("click", () => this.toggleFold());
    $("menu").addEventListener("click", () => this.menu(!$("side").classList.contains("open")));
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();  // the address behind the # says what is shown, and nothing else
      $("turns").focus();
    });
    setInterval(() => this.tick(), 500);
  }

  async start() {
    const known = await this.sessions.load();
    this.sessions.start();
    this.place = link.read();
    if (known) this.go(this.place, { write: false });
  }

  // What is shown.

  async go(place, { write = true } = {}) {
    const before = this.place;
    this.place = { session: place.session ?? null, turn: place.turn ?? null, with: place.with ?? null };
    if (write) link.write(this.place);
    this.sessions.mark(this.place.session, this.place.with);
    if (this.place.session === null) {
      this.stopLive();
      this.view = null;
      this.stateEmpty();
      return;
    }
    const same = before.session === this.place.session && before.with === this.place.with;
    if (same && this.loading) return;  // what is being read will be shown at this place
    if (!same || this.view === null) await this.load();
    else {
      if (this.place.turn !== null) this.tabs.show("inspector");
      this.showTurn(null);
    }
  }

  async load() {
    this.stopLive();
    this.stateLoading("Reading the session");
    this.view = null;
    const place = this.place;
    this.loading = place;
    try {
      const [view, other] = await Promise.all([readView(place.session), place.with ? readView(place.with) : null]);
      if (place.session !== this.place.session || place.with !== this.place.with) return;
      this.view = view;
      this.other = other;
    } catch (error) {
      if (place.session === this.place.session) this.stateProblem("This session cannot be shown", error);
      return;
    } finally {
      if (this.loading === place) this.loading = null;
    }
    this.showAll(false);
    this.tabs.show(this.other ? "versus" : place.turn === null ? "amdahl" : "inspector");
    if (/^(live|run)~/.test(place.session)) this.follow(place.session);
  }

  showAll(keep) {
    const { view, other, place } = this;
    const names = [place.session, place.with].map((ref) => (ref ? (this.sessions.name(ref) ?? line(ref, 40)) : null));
    $("state").className = "state";
    $("state").replaceChildren();
    $("shown").hidden = $("detail").hidden = false;
    $("app").classList.remove("alone");
    $("crumb").textContent = other ? `${names[0]} against ${names[1]}` : names[0];
    document.title = `${names[0]} · DLite Agent`;
    showHead(view, names[0]);
    this.times.extent = 0;
    this.times.show(view, place.session, { keep, name: other ? `First: ${names[0]}` : null, compact: other !== null });
    this.showSecond(names, keep);
    const others = other ? new Map(other.turns.map((turn) => [turn.turn, turn])) : null;
    this.turns.show(view, others);
    this.panel.show(place.session, view);
    $("compare").disabled = false;
    $("compare").textContent = other ? "End comparison" : "Compare";
    $("compare").setAttribute("aria-pressed", String(Boolean(other) || this.picking));
    this.showTurn(null, !keep);
    this.ranged();
    this.tick();
  }

  showSecond(names, keep) {
    $("times-b").hidden = this.other === null;
    this.tabs.offer("versus", this.other !== null);
    if (this.other === null) {
      this.timesB?.destroy();
      this.timesB = null;
      return;
    }
    this.timesB ??= new Timeline($("times-b"), {
      select: (turn, call) => this.select(turn, call),
      moved: (window) => this.windowMoved(window, this.timesB),
    });
    this.timesB.fold = this.times.fold;
    this.timesB.show(this.other, this.place.with, { keep, name: `Second: ${names[1]}`, compact: true });
    this.align();
    showVersus(this.view, this.other, names);
  }

  /** Two sessions on one scale. */
  align() {
    const extent = Math.max(this.times.axis.length, this.timesB.axis.length);
    this.timesB.setExtent(extent);
    this.times.setExtent(extent);
  }

  select(turn, call = null) {
    this.place = { ...this.place, turn };
    link.write(this.place);
    this.tabs.show("inspector");
    this.showTurn(call);
  }

  /** `reveal` brings the turn into view, which a session that grows under the reader's eyes must not. */
  showTurn(call, reveal = true) {
    const turn = this.view?.turns.find((item) => item.turn === this.place.turn) ?? null;
    this.times.select(turn?.turn ?? null);
    this.timesB?.select(turn?.turn ?? null);
    this.turns.select(turn?.turn ?? null, { reveal });
    if (turn) {
      if (reveal) this.times.reveal(turn.turn);
      this.inspector.show(this.place.session, turn, call);
    } else if (this.place.turn !== null) this.inspector.empty(`The session has no turn ${this.place.turn}.`);
    else this.inspector.empty("Choose a turn, in the timeline or in the list, to see its figures and texts.");
  }

  zoomToTurn() {
    if (this.place.turn === null && this.view?.turns.length) this.select(this.view.turns[0].turn);
    this.times.toTurn(this.place.turn);
  }

  nextNotable() {
    const turns = this.view?.turns ?? [];
    const notable = (turn) => turn.error || turn.divergences.length || turn.mismatches.length || turn.tools.some((call) => call.error || call.exit_code);
    const from = turns.findIndex((turn) => turn.turn === this.place.turn);
    const found = [...turns.slice(from + 1), ...turns.slice(0, from + 1)].find(notable);
    if (found) this.select(found.turn);
  }

  toggleFold() {
    const fold = !this.times.fold;
    $("fold").setAttribute("aria-pressed", String(fold));
    if (!this.view) return;
    this.times.extent = 0;
    this.times.setFold(fold);
    if (this.timesB) {
      this.timesB.extent = 0;
      this.timesB.setFold(fold);
      this.align();
    }
  }

  windowMoved(window, from) {
    const other = from === this.times ? this.timesB : this.times;
    if (this.other && other?.view) other.setWindow(window[0], window[1], false);
    this.ranged();
  }

  ranged() {
    if (this.view) $("range").textContent = this.times.describe();
  }

  // Choosing.

  chosen(ref) {
    this.menu(false);
    if (this.picking && this.view && ref !== this.place.session) {
      this.picking = false;
      this.go({ ...this.place, with: ref });
      return;
    }
    this.picking = false;
    if (ref === this.place.with) return;
    this.go({ session: ref, turn: null, with: null });
  }

  toggleCompare() {
    if (this.place.with !== null) {
      this.go({ ...this.place, with: null });
      return;
    }
    this.picking = !this.picking;
    $("compare").setAttribute("aria-pressed", String(this.picking));
    $("compare").textContent = this.picking ? "Choose the second session" : "Compare";
    if (this.picking) $("sessions").querySelector("button")?.focus();
  }

  cancel() {
    if (this.picking) this.toggleCompare();
    else if (this.place.with !== null) this.toggleCompare();
    this.menu(false);
  }

  async opened(refs) {
    await this.sessions.load();
    await this.go({ session: refs[0], turn: null, with: refs.length === 2 ? refs[1] : null });
  }

  menu(open) {
    $("side").classList.toggle("open", open);
    $("menu").setAttribute("aria-expanded", String(open));
  }

  // Live.

  follow(ref) {
    const stop = new AbortController();
    this.live = stop;
    const changed = async () => {
      try {
        const view = await readMore(this.view, ref, stop.signal);
        if (stop.signal.aborted) return;
        this.view = view;
        this.showAll(true);
      } catch (error) {
        if (error.status === 404) this.stopLive();
      }
    };
    stayLive(ref, { changed, state: (connected) => ($("app").dataset.live = connected ? "on" : "off") }, stop.signal);
  }

  stopLive() {
    this.live?.abort();
    this.live = null;
    delete $("app").dataset.live;
  }

  tick() {
    if (!this.view) return;
    const now = nowOf(this.view);
    const last = this.view.turns[this.view.turns.length - 1];
    this.times.setNow(now === null ? null : { since: last && !last.finished ? last.start : this.view.wall, until: now });
  }

  themed() {
    this.times.themed();
    this.timesB?.themed();
    if (this.view && this.panel.curve) this.panel.drawCurve();
  }

  // States without a session.

  state(...children) {
    $("shown").hidden = $("detail").hidden = true;
    $("app").classList.add("alone");
    $("compare").disabled = true;
    $("state").className = "state on";
    $("state").replaceChildren(...children);
  }

  stateEmpty() {
    $("crumb").textContent = "";
    document.title = "DLite Agent: where the time goes";
    const some = (this.sessions.total ?? 0) > 0;
    this.state(
      h("h2", {}, some ? "Choose a session" : "No sessions yet"),
      h("p", {}, some ? "Each bar of a sparkline is a turn or a few: prefill, decoding, tools." : "Send a request to this server and it appears here while it runs."),
      h("p", {}, "A recorded file works too: drop it anywhere on this page. Ours, pi, Claude Code, mini-swe-agent, SWE-agent, ATIF, workload CSV and OpenAI chat logs can be read."),
      h("label", { className: "button strong", for: "open" }, "Open file"),
    );
  }

  stateLoading(text) {
    this.state(h("div", { className: "skeleton", "aria-hidden": "true" }, h("i"), h("i"), h("i")), h("p", {}, `${text}…`));
  }

  stateProblem(title, error) {
    if (error.status === 401 && !$("key-dialog").open) this.askKey("This server asks for an API key.");
    const again = h("button", { type: "button", className: "button", onclick: () => this.retry() }, "Try again");
    const back = h("button", { type: "button", className: "button", onclick: () => this.go({}) }, "All sessions");
    const text = error instanceof Problem ? error.message : `The page met an error: ${error.message}`;
    this.state(h("h2", {}, title), h("p", { role: "alert" }, line(text, 400)), h("div", { className: "buttons" }, again, back));
  }

  async retry() {
    if (!(await this.sessions.load())) return;
    this.view = null;
    await this.go(this.place, { write: false });
  }

  listFailed(error) {
    if (error.status === 401) {
      if (!$("key-dialog").open) this.askKey(this.asked ? "This key is not accepted." : null);
      this.asked = true;
    }
    if (this.view === null && !this.loading) this.stateProblem("The sessions cannot be read", error);
  }

  counted(total) {
    if (this.place.session === null && this.knownTotal !== total) {
      this.knownTotal = total;
      this.stateEmpty();
    }
  }

  askKey(problem) {
    askKey(problem, () => this.retry());
  }
}

const page = new Page();
page.start();
