// Keys that work anywhere on the page but in fields.

import { $ } from "./dom.js";
import * as theme from "./theme.js";

export function bindKeys(page) {
  const acts = {
    j: () => page.turns.step(1),
    k: () => page.turns.step(-1),
    z: () => page.zoomToTurn(),
    n: () => page.nextNotable(),
    "+": () => page.times.zoom(0.6),
    "=": () => page.times.zoom(0.6),
    "-": () => page.times.zoom(1 / 0.6),
    0: () => page.times.all(),
    i: () => page.toggleFold(),
    c: () => page.view && page.toggleCompare(),
    o: () => $("open").click(),
    t: () => theme.toggle(),
    "?": () => $("help-dialog").showModal(),
    "/": () => {
      page.menu(true);
      $("find").focus();
    },
    Escape: () => page.cancel(),
  };
  const needsView = new Set(["j", "k", "z", "n", "+", "=", "-", "0"]);
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
    const field = event.target.closest?.("input, textarea, select");
    if (field && field.type !== "range") {
      if (event.key === "Escape") field.blur();
      return;
    }
    const act = acts[event.key];
    if (!act || (needsView.has(event.key) && !page.view)) return;
    event.preventDefault();
    act();
  });
}
