// Small bars beside text, as elements: nothing to measure, no canvas a row, and colours that follow the theme by themselves.

import { h } from "./dom.js";
import { ORDER } from "./phases.js";

const SVG = "http://www.w3.org/2000/svg";
const APART = 0.012;
const MOST_WIDE = 6;
const STRIP = 18;
const SPARK = 20;
const SPARK_WIDE = 12;

/** Seconds of a turn that count as work: idle and outages do not. */
export function work(turn) {
  let sum = 0;
  for (const [phase, value] of Object.entries(turn.seconds)) if (phase !== "client" && phase !== "outage") sum += value;
  return sum;
}

/** A turn's work by phase, with a tick at the first token. */
export function stack(turn, longest) {
  const whole = Math.max(work(turn), 1e-12);
  // The square root keeps short turns legible beside long ones; shares inside a bar stay true.
  const wide = Math.sqrt(whole / longest);
  const stops = [];
  let at = 0;
  for (const phase of ORDER) {
    const share = (turn.seconds[phase] ?? 0) / whole;
    if (share <= 0 || phase === "client" || phase === "outage") continue;
    const end = at + 100 * share;
    const gap = share * wide > APART ? "1px" : "0px";
    stops.push(`var(--phase-${phase}) ${at}% calc(${end}% - ${gap})`, `transparent calc(${end}% - ${gap}) ${end}%`);
    at = end;
  }
  const style = { width: `${100 * wide}%`, background: `linear-gradient(90deg, ${stops.join(", ")})` };
  const first = turn.ttft === null ? null : h("b", { style: { left: `${100 * Math.min(turn.ttft / whole, 1)}%` } });
  return h("div", { className: "stack", style }, first);
}

/** Accepted drafts of a turn, by round or mean of some. */
export function strip(values, most) {
  const tall = values.map((value) => Math.max((value / most) * STRIP, 1));
  return drawing("strip", values.length, STRIP, MOST_WIDE, [["phase-decode", tall.map((y) => [0, y])]]);
}

/** Turns as [decode, tool, other] seconds; heights by the square root. */
export function spark(turns) {
  const most = Math.max(...turns.map(([decode, tool, rest]) => decode + tool + rest), 1e-9);
  const edges = turns.map(([decode, tool, rest]) => {
    const whole = Math.max(decode + tool + rest, 1e-12);
    const scale = (Math.sqrt(whole / most) * (SPARK - 1)) / whole;
    return [0, rest * scale, (rest + decode) * scale, whole * scale];
  });
  const layer = (name, from) => [name, edges.map((edge) => [edge[from], edge[from + 1]])];
  const layers = [layer("phase-prefill", 0), layer("phase-decode", 1), layer("phase-tool", 2)];
  const element = drawing("spark", turns.length, SPARK, SPARK_WIDE, layers);
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", "decode, tool and other seconds by turn");
  return element;
}

/** Columns side by side, at most `wide` pixels each; a layer is a colour and the [low, high] of its columns. */
function drawing(name, columns, height, wide, layers) {
  const element = document.createElementNS(SVG, "svg");
  element.setAttribute("class", name);
  element.setAttribute("viewBox", `0 0 ${Math.max(columns, 1)} ${height}`);
  element.setAttribute("preserveAspectRatio", "none");
  element.style.setProperty("max-width", `${columns * wide}px`);
  for (const [paint, pieces] of layers) {
    const path = document.createElementNS(SVG, "path");
    const boxes = pieces.map(([low, high], i) => (high > low ? `M${i} ${round(height - high)}h.86V${round(height - low)}h-.86z` : ""));
    path.setAttribute("d", boxes.join(""));
    path.style.setProperty("fill", `var(--${paint})`);
    element.append(path);
  }
  return element;
}

function round(value) {
  return Math.round(value * 100) / 100;
}
