// The dialogs: the keyboard and what the signs mean, and the API key.

import { key } from "./api.js";
import { $, h } from "./dom.js";
import { LANES, MEANING, PARTS } from "./phases.js";

const KEYS = [
  ["j k or ↓ ↑", "turn after, turn before"],
  ["z", "zoom to the selected turn; draft, verify and commit appear"],
  ["+ − 0", "zoom in, zoom out, whole session"],
  ["← →", "move, when the timeline has the focus; also drag, or Shift and wheel"],
  ["wheel, pinch", "zoom at the pointer"],
  ["i", "fold or unfold idle time"],
  ["n", "next turn that failed, diverged or has a failed tool"],
  ["c", "compare with another session"],
  ["o", "open a file (or drop one anywhere)"],
  ["/", "find a session"],
  ["t", "light or dark"],
  ["Esc", "close, or end the comparison"],
];

const SIGNS = [
  ["▼ and a line", "first token of the turn"],
  ["◆", "the client's history left the session's ids there; red: a replay gave something else"],
  ["hatched", "inferred from a gap, not measured"],
  ["hatched column", "idle time, folded, with its length"],
  ["red edge", "a tool that failed"],
  ["▢", "sandbox level of the tools"],
];

export function buildHelp() {
  const dialog = $("help-dialog");
  const pairs = (rows, first) => h("dl", { className: "keys" }, ...rows.flatMap(([name, text]) => [h("dt", {}, first(name)), h("dd", {}, text)]));
  const dot = (name) => h("i", { className: "dot", style: { background: `var(--${name})` } });
  const lanes = LANES.map((lane) => [lane.id, MEANING[lane.id]]);
  dialog.replaceChildren(
    h("h2", { id: "help-title" }, "Keyboard"),
    pairs(KEYS, (name) => h("kbd", {}, name)),
    h("h2", {}, "Signs"),
    pairs(SIGNS, (name) => name),
    h("h2", {}, "Lanes"),
    pairs(lanes, (name) => h("span", {}, dot(`phase-${name === "accepted" ? "decode" : name}`), ` ${name}`)),
    h("p", {}, "Inside decode, when rounds are wide enough: ", ...PARTS.flatMap((part) => [dot(`part-${part}`), ` ${part} `])),
    h("form", { method: "dialog", className: "buttons" }, h("button", { className: "button strong" }, "Close")),
  );
}

/** Asks for the key; `then` runs when one was given or forgotten. */
export function askKey(problem, then) {
  const dialog = $("key-dialog");
  $("key-problem").hidden = !problem;
  $("key-problem").textContent = problem ?? "";
  $("key-value").value = key.get();
  $("key-form").onsubmit = () => {
    const value = $("key-value").value.trim();
    if (value) key.set(value);
    else key.forget();
    then();
  };
  $("key-forget").onclick = () => {
    key.forget();
    dialog.close();
    then();
  };
  if (!dialog.open) dialog.showModal();
}
