// Elements made without markup: every text goes in as text, so that nothing recorded can become HTML.

/** An element. `props` are properties, `on*` listeners, `data-*`, `aria-*` and `role` attributes; strings become text. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (/^(aria-|data-|role$|for$|tabindex$|colspan$)/.test(name)) element.setAttribute(name, String(value));
    else if (name === "style") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Sizes a canvas to its box in device pixels; its context in CSS pixels. */
export function fit(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const w = Math.max(1, Math.round(width * ratio));
  const tall = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== tall) canvas.height = tall;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const probes = new Map();
const colours = new Map();

/** The computed value of a colour of tokens.css, for canvases. Each has a probe: to read one dirties no other's style. */
export function colour(name) {
  let value = colours.get(name);
  if (value === undefined) {
    let probe = probes.get(name);
    if (!probe) {
      probe = h("span", { hidden: true, style: { color: `var(--${name})` } });
      probes.set(name, probe);
      document.body.append(probe);
    }
    value = getComputedStyle(probe).color;
    colours.set(name, value);
  }
  return value;
}

/** To be called when light becomes dark or the other way round. */
export function forgetColours() {
  colours.clear();
}

/** Runs `work` once in the next frame, however often it is asked for. */
export function onceAFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

export function say(text) {
  $("said").textContent = text;
}
