// The selected turn: its figures, and the texts that went in and came out. All of it untrusted, so all of it text.

import { get } from "./api.js";
import { work } from "./bars.js";
import { h } from "./dom.js";
import { count, decimal, line, number, percent, seconds, times, visible } from "./format.js";
import { callText, restoreText } from "./hit.js";
import { MEANING, ORDER, PARTS } from "./phases.js";
import { failed } from "./draw.js";
import { badges } from "./turns.js";

const PIECE = 1 << 17;
const SETTLE = 60;  // milliseconds: going through turns with a held key asks for the last one's texts only

export class Inspector {
  constructor(box, onStep) {
    this.box = box;
    this.onStep = onStep;
    this.shownFor = null;
  }

  empty(text) {
    this.shownFor = null;
    this.box.replaceChildren(h("div", { className: "box" }, h("h2", {}, "Turn"), h("p", { className: "muted" }, text)));
  }

  /** Shows a turn; texts are fetched once for each state of it. */
  show(ref, turn, callId = null) {
    const state = `${ref} ${turn.turn} ${turn.finished} ${turn.tools.filter((call) => call.finished).length}`;
    const again = this.shownFor === state;
    this.shownFor = state;
    if (!again) {
      this.texts = h("div", { className: "box" }, h("p", { className: "muted" }, "Reading the texts…"));
      this.load(ref, turn, callId, state);
    }
    this.box.replaceChildren(figures(turn, this.onStep), this.texts);
    if (again) this.mark(callId);
  }

  async load(ref, turn, callId, state) {
    await new Promise((resolve) => setTimeout(resolve, SETTLE));
    if (this.shownFor !== state) return;
    let found;
    try {
      found = await get("content", { ref, turn: turn.turn });
    } catch (error) {
      if (this.shownFor !== state) return;
      this.texts.replaceChildren(h("p", { className: "problem", role: "alert" }, `The texts cannot be read. ${error.message}`));
      return;
    }
    if (this.shownFor !== state) return;
    const none = "No texts were recorded. A server keeps them when it is started with --log-content.";
    const parts = found.parts.map((part, index) => text(ref, turn, part, index));
    this.texts.replaceChildren(h("h2", {}, "Messages and tools"), ...(parts.length ? parts : [h("p", { className: "muted" }, none)]));
    this.mark(callId);
  }

  /** Brings a tool call's output into view. */
  mark(callId) {
    for (const element of this.texts.querySelectorAll(".text.at")) element.classList.remove("at");
    if (callId === null) return;
    const all = [...this.texts.querySelectorAll(".text")].filter((element) => element.dataset.call === callId);
    for (const element of all) element.classList.add("at");
    all[0]?.scrollIntoView({ block: "nearest" });
  }
}

function fact(name, value, title) {
  return h("div", { title: title ?? "" }, h("dt", {}, name), h("dd", {}, value));
}

function figures(turn, onStep) {
  const means = turn.means;
  const amdahl = turn.amdahl;
  const facts = [
    fact("whole turn", seconds(turn.end - turn.start)),
    fact("first token", seconds(turn.ttft), "from the request's arrival"),
    fact("prompt", count(turn.prompt_tokens)),
    fact("cached", turn.cached_tokens === null ? "–" : `${count(turn.cached_tokens)} (${Math.floor((100 * turn.cached_tokens) / Math.max(turn.prompt_tokens ?? 1, 1))} %)`),
    fact("answer", count(turn.output_tokens)),
    fact("ended by", turn.error ? line(turn.error, 40) : turn.finished ? line(turn.finish_reason ?? "–", 24) : "not finished"),
  ];
  if (means) {
    facts.push(
      fact("tau", decimal(means.tau), "mean tokens a round"),
      fact("T_AR", amdahl?.ar.tokens ? seconds(amdahl.ar.seconds / amdahl.ar.tokens) : "not known"),
      fact("T_D / T_V / T_S", `${ms(means.t_d)} / ${ms(means.t_v)} / ${ms(means.t_s)} ms`),
      fact("context, batch", `${count(means.context)}, ${decimal(means.batch, 1)}`),
    );
  }
  if (amdahl) {
    facts.push(fact("f", decimal(amdahl.f[0]), "decode share of the autoregressive-equivalent time"));
    if (amdahl.s_d) facts.push(fact("S_D", times(amdahl.s_d[0])));
    facts.push(fact("workflow, bound", `${times(number(amdahl.workflow[0]))}, ${times(number(amdahl.bound[0]))}`));
  }
  return h(
    "div",
    { className: "box" },
    h(
      "div",
      { className: "box-head" },
      h("h2", {}, `Turn ${turn.turn}`),
      turn.trigger ? h("span", { className: "muted" }, `by ${line(turn.trigger, 12)}`) : null,
      h("button", { type: "button", className: "button only-narrow", onclick: () => document.querySelector(".turns-panel").scrollIntoView() }, "Turns"),
      h("button", { type: "button", className: "icon", "aria-label": "Turn before (k)", title: "Turn before (k)", onclick: () => onStep(-1) }, "↑"),
      h("button", { type: "button", className: "icon", "aria-label": "Turn after (j)", title: "Turn after (j)", onclick: () => onStep(1) }, "↓"),
    ),
    h("div", { className: "chips" }, ...badges(turn)),
    phaseTable(turn),
    h("dl", { className: "facts-grid" }, ...facts),
    turn.rounds ? histogram(turn) : null,
    ...turn.restores.map((item) => h("p", { className: "muted" }, `Restored ${restoreText(item).trim()}.`)),
    ...turn.mismatches.map((item) => h("p", {}, mismatchText(item))),
    ...turn.divergences.map((item) => h("p", {}, `Diverged: ${line(item.reason, 80)} at token ${item.position}.`)),
  );
}

/** A place where a replay differs from what it was compared with. */
function mismatchText(item) {
  const unit = item.what === "token" ? "token" : "character";
  const more = item.count > 1 ? `, ${count(item.count)} places in all` : "";
  return `Replay differs from ${line(item.against, 60)}: ${item.what} at ${unit} ${count(item.position)}${more}.`;
}

function ms(value) {
  return (value * 1e3).toFixed(value < 0.01 ? 2 : 1);
}

function phaseTable(turn) {
  const whole = work(turn);
  const rows = [];
  for (const phase of ORDER) {
    const value = turn.seconds[phase];
    if (!value) continue;
    const inferred = turn.inferred[phase] ? " (inferred)" : "";
    const share = phase === "client" || phase === "outage" ? "" : percent(whole > 0 ? value / whole : 0);
    rows.push(row(`phase-${phase}`, phase + inferred, value, share, MEANING[phase]));
    if (phase === "decode") {
      for (const part of PARTS) if (turn.parts[part]) rows.push(row(`part-${part}`, part, turn.parts[part], percent(turn.parts[part] / value), null, true));
    }
  }
  return h("table", {}, h("thead", {}, h("tr", {}, ...["phase", "seconds", "share"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows));
}

function row(paint, name, value, share, title, inner = false) {
  const dot = h("i", { className: "dot", style: { background: `var(--${paint})`, "margin-left": inner ? "14px" : "0" } });
  return h("tr", { title: title ?? "" }, h("td", {}, dot, ` ${name}`), h("td", {}, seconds(value)), h("td", {}, share));
}

function histogram(turn) {
  const most = Math.max(...Object.values(turn.advances));
  const rows = Object.entries(turn.advances).map(([advance, n]) =>
    h(
      "tr",
      {},
      h("td", {}, String(Number(advance) - 1)),
      h("td", {}, String(n)),
      h("td", { style: { width: "60%" } }, h("i", { className: "dot", style: { width: `${(100 * n) / most}%`, background: "var(--phase-decode)" } })),
    ),
  );
  return h(
    "details",
    {},
    h("summary", {}, `Accepted drafts over ${count(turn.rounds)} rounds`),
    h("table", {}, h("thead", {}, h("tr", {}, ...["accepted", "rounds", ""].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, ...rows)),
  );
}

const KINDS = { message: "in", reasoning: "out", answer: "out", call: "call", output: "tool output" };

function text(ref, turn, part, index) {
  const call = part.call_id === null ? null : (turn.tools.find((item) => item.call_id === part.call_id) ?? null);
  const pre = h("pre", { tabindex: 0, "aria-label": `${KINDS[part.kind] ?? ""} ${line(part.title, 60)}` }, visible(part.text));
  const marks = [h("span", { className: "badge" }, KINDS[part.kind] ?? line(part.kind, 20)), h("b", {}, line(part.title, 80))];
  if (call && part.kind === "output") {
    if (failed(call)) marks.push(h("span", { className: "badge bad" }, call.error ? line(call.error, 40) : `exit ${call.exit_code}`));
    else if (call.exit_code === 0) marks.push(h("span", { className: "badge good" }, "exit 0"));
    marks.push(h("span", { className: "muted", title: callText(call) }, `${seconds(call.end - call.start)}${call.measured ? "" : ", inferred"}`));
    if (call.sandbox) marks.push(h("span", { className: "badge" }, `▢ ${line(call.sandbox, 20)}`));
  }
  marks.push(h("span", { className: "grow" }), h("span", { className: "muted" }, `${count(part.length)} characters`));
  const box = h("article", { className: "text", "data-call": part.call_id ?? "" }, h("header", {}, ...marks), pre);
  if ([...part.text].length < part.length) box.append(more(ref, turn, part, index, pre));
  return box;
}

function more(ref, turn, part, index, pre) {
  let have = [...part.text].length;  // the server counts code points
  const button = h("button", { type: "button", className: "button more" });
  const name = () => {
    button.textContent = `Show ${count(Math.min(PIECE, part.length - have))} of ${count(part.length - have)} more characters`;
  };
  name();
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const piece = await get("content", { ref, turn: turn.turn, part: index, offset: have, limit: PIECE });
      have += [...piece.text].length;
      pre.append(visible(piece.text));
      if (have >= part.length || !piece.text) button.remove();
      else name();
    } catch (error) {
      button.textContent = `${error.message} Try again`;
    }
    button.disabled = false;
  });
  return button;
}
