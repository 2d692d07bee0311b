// The whole session on one line, with the part that the lanes show marked on it.

import { colour, fit } from "./dom.js";
import { ORDER } from "./phases.js";

export const MINI_HEIGHT = 26;

/** Seconds of each phase under each pixel, as stacked columns drawn once into a canvas of their own. */
export function paint(view, axis, width, length) {
  const columns = Math.max(1, Math.floor(width));
  const scale = columns / length;
  const sums = new Map(ORDER.map((phase) => [phase, null]));
  const add = (bars) => {
    for (const [index, start, end, , share] of bars) {
      const phase = view.phases[index];
      let row = sums.get(phase);
      if (!row) sums.set(phase, (row = new Float32Array(columns)));
      const a = axis.unit(start) * scale;
      const b = axis.unit(end) * scale;
      const first = Math.max(0, Math.floor(a));
      const last = Math.min(columns - 1, Math.floor(b));
      for (let i = first; i <= last; i += 1) row[i] += share * Math.max(0, Math.min(b, i + 1) - Math.max(a, i));
    }
  };
  for (const turn of view.turns) add(turn.lanes);
  add(view.gaps);
  const canvas = document.createElement("canvas");
  const context = fit(canvas, columns, MINI_HEIGHT);
  for (let i = 0; i < columns; i += 1) {
    let y = MINI_HEIGHT;
    for (const phase of ORDER) {
      const row = sums.get(phase);
      if (!row || row[i] <= 0 || phase === "client") continue;
      const tall = Math.min(row[i], 1) * MINI_HEIGHT;
      context.fillStyle = colour(`phase-${phase}`);
      context.fillRect(i, y - tall, 1, tall);
      y -= tall;
    }
  }
  return canvas;
}

/** Draws the painted session and dims what lies outside the window. */
export function show(canvas, painted, length, [u0, u1], width) {
  const context = fit(canvas, width, MINI_HEIGHT);
  context.fillStyle = colour("raised");
  context.fillRect(0, 0, width, MINI_HEIGHT);
  context.drawImage(painted, 0, 0, width, MINI_HEIGHT);
  const left = (u0 / length) * width;
  const right = (u1 / length) * width;
  context.globalAlpha = 0.72;
  context.fillStyle = colour("panel");
  context.fillRect(0, 0, left, MINI_HEIGHT);
  context.fillRect(right, 0, width - right, MINI_HEIGHT);
  context.globalAlpha = 1;
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 3), MINI_HEIGHT - 1.5);
}
