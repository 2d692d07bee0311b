// The Amdahl panel: what faster decoding and faster tools would bring, computed here as the report computes it.

import { whatIf } from "./amdahl.js";
import { colour, fit, h } from "./dom.js";
import { count, decimal, number, percent, seconds, times } from "./format.js";

const LOW = 0.5;
const HIGH = 32;

const toSlider = (sD) => Math.round((1000 * Math.log(sD / LOW)) / Math.log(HIGH / LOW));
const fromSlider = (value) => LOW * (HIGH / LOW) ** (value / 1000);

export class AmdahlPanel {
  constructor(box) {
    this.box = box;
    this.ref = null;
    this.sD = null;  // as measured, until a slider says otherwise
    this.tools = 1;
    new ResizeObserver(() => this.curve && this.drawCurve()).observe(box);  // also when its tab is opened
  }

  /** Shows a session; the sliders stay where they are as long as it is the same one. */
  show(ref, view) {
    if (ref !== this.ref) {
      this.sD = null;
      this.tools = 1;
    }
    const using = ref === this.ref && this.box.contains(document.activeElement) && this.curve;
    this.ref = ref;
    this.view = view;
    this.case = known(view);
    if (using && this.case !== null) {
      this.compute();  // the session has grown while a slider is held: it must stay
      return;
    }
    if (this.case === null) {
      const why = view.unknown.length ? view.unknown : ["The log does not say what decoding took."];
      this.curve = null;
      this.box.replaceChildren(h("div", { className: "box" }, h("h2", {}, "What faster decoding can bring"), ...why.map((text) => h("p", { className: "muted" }, text))));
      return;
    }
    this.build();
  }

  build() {
    const { measured, guess, ar } = this.case;
    const start = this.sD ?? measured ?? 1;
    this.sliderD = h("input", { type: "range", min: 0, max: 1000, step: 1, value: toSlider(start), id: "slider-sd" });
    this.outD = h("output", { htmlFor: "slider-sd" });
    this.sliderT = h("input", { type: "range", min: 0, max: 200, step: 1, value: Math.round(this.tools * 100), id: "slider-tool" });
    this.outT = h("output", { htmlFor: "slider-tool" });
    this.sliderD.addEventListener("input", () => {
      this.sD = fromSlider(Number(this.sliderD.value));
      this.compute();
    });
    this.sliderT.addEventListener("input", () => {
      this.tools = Number(this.sliderT.value) / 100;
      this.compute();
    });
    this.answers = { workflow: h("dd", { id: "answer-workflow" }), now: h("dd", { id: "answer-now" }), bound: h("dd", { id: "answer-bound" }) };
    this.line = h("p", { className: "muted", id: "answer-line" });
    this.curve = h("canvas", { role: "img", "aria-label": "Workflow speed-up against decode speed-up, with its bound" });
    const reset = h("button", { type: "button", className: "button", onclick: () => this.reset() }, "As it ran");
    this.box.replaceChildren(
      h(
        "div",
        { className: "box" },
        h("div", { className: "box-head" }, h("h2", {}, "What faster decoding can bring"), reset),
        guess ? h("p", { className: "muted" }, "The log does not split model time: all of it is taken as decoding, so these are upper limits.") : null,
        h("div", { className: "slider" }, h("label", { for: "slider-sd" }, guess ? "Model time faster by" : "S_D, decoding faster by"), this.outD, this.sliderD),
        h("div", { className: "slider" }, h("label", { for: "slider-tool" }, "Tool time"), this.outT, this.sliderT),
        h(
          "dl",
          { className: "answer" },
          guess ? null : h("div", { title: "workflow speed-up against decoding one by one" }, h("dt", {}, "against one by one"), this.answers.workflow),
          h("div", { title: "against the session as it was recorded" }, h("dt", {}, "against the recording"), this.answers.now),
          h("div", { title: "with decoding in no time" }, h("dt", {}, "bound"), this.answers.bound),
        ),
        this.line,
        h("div", { className: "plot-box" }, this.curve),
        figuresLine(this.view),
        levers(this.view),
        ar.error > 0 || this.view.t_ar_source ? h("p", { className: "muted" }, `T_AR from: ${this.view.t_ar_source ?? "not known"}.`) : null,
      ),
    );
    this.compute();
  }

  reset() {
    this.sD = null;
    this.tools = 1;
    this.build();
    this.sliderD.focus();
  }

  compute() {
    const sD = this.sD ?? this.case.measured ?? 1;
    const figures = whatIf(this.case.seconds, this.case.ar, sD, this.tools);
    this.outD.textContent = times(sD);
    this.outT.textContent = percent(this.tools);
    this.sliderD.setAttribute("aria-valuetext", `${sD.toFixed(2)} times`);
    this.sliderT.setAttribute("aria-valuetext", `${Math.round(this.tools * 100)} percent`);
    this.answers.workflow.textContent = times(figures.workflow[0]);
    this.answers.now.textContent = times(figures.against_now);
    this.answers.bound.textContent = times(figures.bound[0]);
    const range = figures.workflow[2] - figures.workflow[1] > 0.005 ? `, ${times(figures.workflow[1])} to ${times(figures.workflow[2])} by the error of T_AR` : "";
    this.line.textContent = `f ${decimal(figures.f[0], 3)}; ${seconds(figures.then)} of work instead of ${seconds(figures.now)}${range}.`;
    this.drawCurve();
  }

  drawCurve() {
    const width = this.curve.clientWidth;
    if (width < 20) return;
    const height = 120;
    const context = fit(this.curve, width, height);
    const { seconds: base, ar, measured } = this.case;
    const at = (sD) => whatIf(base, ar, sD, this.tools).workflow[0];
    const now = this.sD ?? measured ?? 1;
    const limit = whatIf(base, ar, now, this.tools).bound[0];
    const top = Math.max(Number.isFinite(limit) ? limit : at(HIGH), at(HIGH), 1.01) * 1.06;
    const floor = Math.min(at(LOW), 1);
    const x = (sD) => 30 + (Math.log(sD / LOW) / Math.log(HIGH / LOW)) * (width - 38);
    const y = (value) => height - 18 - ((value - floor) / (top - floor)) * (height - 28);
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    for (const sD of [0.5, 1, 2, 4, 8, 16, 32]) {
      context.beginPath();
      context.moveTo(x(sD), 8);
      context.lineTo(x(sD), height - 18);
      context.stroke();
      context.fillText(`${sD}×`, Math.min(x(sD) - 6, width - 22), height - 8);
    }
    if (Number.isFinite(limit)) {
      context.strokeStyle = colour("muted");
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(30, y(limit));
      context.lineTo(width - 8, y(limit));
      context.stroke();
      context.setLineDash([]);
      context.fillText(decimal(limit, 1), 2, y(limit));
    }
    context.fillText(decimal(1, 1), 2, y(1));
    context.strokeStyle = colour("phase-decode");
    context.lineWidth = 2;
    context.beginPath();
    for (let i = 0; i <= 80; i += 1) {
      const sD = LOW * (HIGH / LOW) ** (i / 80);
      if (i === 0) context.moveTo(x(sD), y(at(sD)));
      else context.lineTo(x(sD), y(at(sD)));
    }
    context.stroke();
    if (measured !== null) dot(context, x(Math.min(Math.max(measured, LOW), HIGH)), y(at(measured)), colour("panel"), colour("phase-decode"));
    dot(context, x(now), y(at(now)), colour("phase-decode"), colour("text"));
  }
}

function dot(context, x, y, fill, edge) {
  context.beginPath();
  context.arc(x, y, 4.5, 0, 2 * Math.PI);
  context.fillStyle = fill;
  context.fill();
  context.lineWidth = 1.5;
  context.strokeStyle = edge;
  context.stroke();
}

/** What the panel computes with: all known, or model time as an upper limit, or null. `measured` is S_D as it ran. */
export function known(view) {
  if (view.amdahl) {
    const measured = view.amdahl.s_d ? view.amdahl.s_d[0] : null;
    if (view.amdahl.ar.seconds > 0) return { seconds: view.seconds, ar: view.amdahl.ar, measured, guess: false };
  }
  if (view.ceiling !== null) {
    const { decode, model, ...rest } = view.seconds;
    const all = { ...rest, decode: decode + model };
    return { seconds: all, ar: { seconds: all.decode, error: 0, tokens: 0 }, measured: 1, guess: true };
  }
  return null;
}

function figuresLine(view) {
  const means = view.means;
  if (!means) return null;
  const ar = view.amdahl?.ar;
  const tAr = ar?.tokens ? `${seconds(ar.seconds / ar.tokens)} ± ${seconds(ar.error / ar.tokens)}` : "not known";
  const off = ar && ar.extrapolated > 0 ? ` ${percent(ar.extrapolated)} of the tokens lie outside the calibration of T_AR.` : "";
  return h(
    "p",
    { className: "muted" },
    `tau ${decimal(means.tau)}, T_AR ${tAr}, T_D ${seconds(means.t_d)}, T_V ${seconds(means.t_v)}, T_S ${seconds(means.t_s)}, ` +
      `context ${count(means.context)}, batch ${decimal(means.batch, 1)}, ${count(means.rounds)} rounds.${off}`,
  );
}

function levers(view) {
  const rows = view.levers
    .filter((lever) => lever.saved > 0)
    .map((lever) => h("tr", {}, h("td", {}, lever.name), h("td", {}, seconds(lever.saved)), h("td", {}, times(number(lever.speedup)))));
  if (!rows.length) return null;
  const names = ["one change, the rest as it ran", "saves", "faster"].map((name) => h("th", { scope: "col" }, name));
  return h("table", {}, h("thead", {}, h("tr", {}, ...names)), h("tbody", {}, ...rows));
}

