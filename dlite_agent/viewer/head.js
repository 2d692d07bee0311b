// The session's head: what it is, its figures, and its phases as one bar that is the legend too.

import { $, h } from "./dom.js";
import { count, decimal, line, number, percent, plural, seconds, times } from "./format.js";
import { IDLE, MEANING, ORDER } from "./phases.js";

export function showHead(view, name) {
  const work = workOf(view.seconds);
  const amdahl = view.amdahl;
  const share = amdahl ? amdahl.f[0] : null;
  const cached = view.turns.reduce((sum, turn) => sum + (turn.cached_tokens ?? 0), 0);
  const prompt = view.turns.reduce((sum, turn) => sum + (turn.cached_tokens === null ? 0 : (turn.prompt_tokens ?? 0)), 0);
  const output = view.turns.reduce((sum, turn) => sum + (turn.output_tokens ?? 0), 0);
  const ceiling = view.ceiling !== null ? `≤ ${times(number(view.ceiling))}` : "–";
  $("head").replaceChildren(
    h(
      "div",
      { className: "title" },
      h("h1", { title: line(view.session, 300) }, line(name ?? view.session, 90)),
      view.in_flight ? h("span", { className: "badge good" }, h("i", { className: "dot pulse" }), "running") : null,
      h("span", { className: "badge" }, line(view.source, 24)),
      view.clock === "monotonic" ? null : h("span", { className: "badge warn", title: CLOCKS[view.clock] }, `clock: ${view.clock}`),
      view.target ? h("span", { className: "badge", title: "target" }, line(view.target, 32)) : null,
      view.drafter ? h("span", { className: "badge accent", title: "drafter" }, line(view.drafter, 32)) : null,
      view.replayed ? h("span", { className: "badge accent" }, `replay of ${line(view.replayed.original, 40)}: ${line(view.replayed.side, 24)}`) : null,
      view.segments > 1 ? h("span", { className: "badge warn" }, `${view.segments} processes`) : null,
      ...levelsOf(view).map((level) => h("span", { className: "badge", title: "sandbox level" }, `▢ ${line(level, 24)}`)),
    ),
    h(
      "dl",
      { className: "figures" },
      figure("work", seconds(work), `of ${seconds(view.wall)}`, "without client idle and outages"),
      figure("turns", count(view.turn_count), view.rounds ? `${count(view.rounds)} rounds` : ""),
      figure("answered", count(output), "tokens"),
      figure("cached", prompt ? percent(cached / prompt) : "–", "of prompts"),
      figure("tau", view.means ? decimal(view.means.tau) : "–", "tokens / round"),
      figure("f", share === null ? "–" : decimal(share), "decode share", "of the autoregressive-equivalent time"),
      figure("S_D", amdahl?.s_d ? times(amdahl.s_d[0]) : "–", ""),
      figure("workflow", amdahl ? times(number(amdahl.workflow[0])) : "–", amdahl ? `bound ${times(number(amdahl.bound[0]))}` : `bound ${ceiling}`),
    ),
    phaseBar(view),
    ...remarks(view),
  );
}

const CLOCKS = {
  wall: "times are a foreign log's wall clock",
  durations: "only some lengths are known; they are laid end to end",
  none: "the log has no times, only an order",
};

export function workOf(totals) {
  return Object.entries(totals).reduce((sum, [phase, value]) => (IDLE.has(phase) ? sum : sum + value), 0);
}

function levelsOf(view) {
  const levels = new Set();
  for (const turn of view.turns) for (const call of turn.tools) if (call.sandbox) levels.add(call.sandbox);
  return [...levels].slice(0, 3);
}

function figure(name, value, note, title) {
  return h("div", { className: "figure", title: title ?? "" }, h("dt", {}, name), h("dd", {}, value), h("dd", { className: "note" }, note || "\u00a0"));
}

function phaseBar(view) {
  const work = workOf(view.seconds);
  const present = ORDER.filter((phase) => view.seconds[phase] > 0);
  const busy = present.filter((phase) => !IDLE.has(phase));
  const segments = busy.map((phase) => h("i", { style: { flex: String(view.seconds[phase] / Math.max(work, 1e-12)), background: `var(--phase-${phase})` } }));
  const items = present.map((phase) => {
    const share = IDLE.has(phase) ? "" : ` ${percent(view.seconds[phase] / Math.max(work, 1e-12))}`;
    const inferred = view.inferred[phase] > 0 ? ", inferred" : "";
    return h(
      "li",
      { title: MEANING[phase] },
      h("i", { className: "dot", style: { background: `var(--phase-${phase})` } }),
      h("b", {}, phase),
      h("span", { className: "muted" }, `${seconds(view.seconds[phase])}${share}${inferred}`),
    );
  });
  return h("div", {}, h("div", { className: "phase-bar", "aria-hidden": "true" }, ...segments), h("ul", { className: "legend" }, ...items));
}

function remarks(view) {
  const notes = view.notes.map((note) => `Note${note.turn === null ? "" : ` on turn ${note.turn}`}: ${line(note.text, 400)}`);
  const all = [...view.unknown, ...view.problems.map((text) => line(text, 300)), ...notes];
  if (!all.length) return [];
  const summary = h("summary", {}, `${plural(all.length, "remark")}: ${line(all[0], 110)}`);
  return [h("details", { className: "remarks", open: false }, summary, ...all.map((text) => h("p", {}, text)))];
}
