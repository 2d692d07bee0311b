// Two sessions side by side: phases, speed-ups measured and predicted, and turns in pairs.

import { $, h } from "./dom.js";
import { decimal, number, percent, seconds, times } from "./format.js";
import { workOf } from "./head.js";
import { ORDER } from "./phases.js";

/** Figures of two sessions; `measured` is the ratio of their work. */
export function versus(first, second) {
  const [a, b] = [workOf(first.seconds), workOf(second.seconds)];
  return { first: a, second: b, measured: b > 0 ? a / b : null };
}

export function showVersus(first, second, names) {
  const box = $("versus");
  const both = versus(first, second);
  const rows = ORDER.filter((phase) => first.seconds[phase] > 0 || second.seconds[phase] > 0).map((phase) =>
    row(phase, seconds(first.seconds[phase]), seconds(second.seconds[phase]), ratio(first.seconds[phase], second.seconds[phase]), `phase-${phase}`),
  );
  rows.push(row("work", seconds(both.first), seconds(both.second), times(both.measured)));
  rows.push(row("wall clock", seconds(first.wall), seconds(second.wall), ratio(first.wall, second.wall)));
  rows.push(row("tau", tau(first), tau(second), ""));
  rows.push(row("f", share(first), share(second), ""));
  rows.push(row("S_D", speed(first, "s_d"), speed(second, "s_d"), ""));
  rows.push(row("workflow, predicted", speed(first, "workflow"), speed(second, "workflow"), ""));
  const tokens = matched(first, second);
  box.replaceChildren(
    h(
      "div",
      { className: "box" },
      h("h2", {}, "Side by side"),
      h("p", { className: "muted" }, `First: ${names[0]}. Second: ${names[1]}.`),
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...["", "first", "second", "first / second"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, ...rows),
      ),
      h("p", { id: "versus-line" }, verdict(first, second, both)),
      h("p", { className: "muted" }, tokens),
    ),
  );
}

function verdict(first, second, both) {
  if (both.measured === null) return "The second session has no work to compare with.";
  const plain = !first.amdahl?.s_d || Math.abs(first.amdahl.s_d[0] - 1) < 0.05;
  const measured = `Measured, the second did the work ${times(both.measured)} as fast.`;
  if (!plain || !second.amdahl?.s_d) return measured;
  const predicted = number(second.amdahl.workflow[0]);
  return `${measured} Predicted from the second alone: ${times(predicted)}; they differ by ${percent(Math.abs(both.measured / predicted - 1), 1)}.`;
}

function matched(first, second) {
  const others = new Map(second.turns.map((turn) => [turn.turn, turn]));
  const pairs = first.turns.filter((turn) => others.has(turn.turn));
  const same = pairs.filter((turn) => others.get(turn.turn).output_tokens === turn.output_tokens).length;
  return `${pairs.length} turns in both; ${same} of them with answers of equal length. Ratios are seconds of the first over seconds of the second.`;
}

function ratio(a, b) {
  return b > 0 && a > 0 ? times(a / b) : "";
}

function tau(view) {
  return view.means ? decimal(view.means.tau) : "–";
}

function share(view) {
  return view.amdahl ? decimal(view.amdahl.f[0], 3) : "–";
}

function speed(view, name) {
  const found = view.amdahl?.[name];
  return found ? times(number(found[0])) : "–";
}

function row(name, a, b, c, paint) {
  const dot = paint ? h("i", { className: "dot", style: { background: `var(--${paint})` } }) : null;
  return h("tr", {}, h("td", {}, dot, ` ${name}`), h("td", {}, a), h("td", {}, b), h("td", {}, c));
}
