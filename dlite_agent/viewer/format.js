// How figures and untrusted text are worded.

/** Seconds at three digits, in the unit that reads best. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 0.0995) return `${(value * 1e3).toFixed(size < 9.95e-3 ? 2 : 1)} ms`;
  if (size < 0.9995) return `${(value * 1e3).toFixed(0)} ms`;
  if (size < 9.995) return `${value.toFixed(2)} s`;
  if (size < 99.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return String(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export function percent(part, digits = 0) {
  return part === null || part === undefined || !Number.isFinite(part) ? "–" : `${(100 * part).toFixed(digits)} %`;
}

/** A speed-up. */
export function times(value) {
  if (value === null || value === undefined) return "–";
  if (value === Infinity) return "no limit";
  return `${value.toFixed(2)}×`;
}

export function decimal(value, digits = 2) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

/** JSON's "inf" as a number. */
export function number(value) {
  return value === "inf" ? Infinity : value;
}

export function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}

// Control characters could reorder, hide or ring; each becomes a sign that can be seen. Tab and newline stay.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const LONE = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Untrusted text with nothing invisible in it. */
export function visible(text) {
  return String(text)
    .replaceAll("\r\n", "\n")
    .replace(HIDDEN, (sign) => {
      const code = sign.charCodeAt(0);
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      return code === 0x7f ? "\u2421" : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
    })
    .replace(LONE, "\ufffd");
}

/** Untrusted text for one line, cut to a length. */
export function line(text, limit = 120) {
  const one = visible(String(text ?? "").slice(0, limit + 1).replace(/\s+/g, " "));
  return one.length > limit ? `${one.slice(0, limit)}…` : one;
}
