// Light or dark: the system's choice unless the user made one.

import { forgetColours } from "./dom.js";

const SLOT = "dlite-agent-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export function current() {
  return document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");
}

export function set(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(SLOT, theme);
  } catch {
    // Storage may be switched off; the choice then lasts as long as the page.
  }
  changed();
}

export function toggle() {
  set(current() === "dark" ? "light" : "dark");
}

export function onChange(work) {
  listeners.add(work);
}

function changed() {
  forgetColours();
  for (const work of listeners) work();
}

export function start() {
  let stored = null;
  try {
    stored = localStorage.getItem(SLOT);
  } catch {
    // As above.
  }
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  system.addEventListener("change", changed);
}
