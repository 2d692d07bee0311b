// The server: JSON with the key as a header, and its events as a stream that is read by hand, since EventSource can
// send no header.

const SLOT = "dlite-agent-key";
const BASE = new URL("../v1/viewer/", document.baseURI);

export class Problem extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(SLOT) ?? "",
  set: (value) => sessionStorage.setItem(SLOT, value),
  forget: () => sessionStorage.removeItem(SLOT),
};

function headers(extra = {}) {
  const value = key.get();
  return value ? { ...extra, authorization: `Bearer ${value}` } : extra;
}

function address(path, query = {}) {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, String(value));
  return url;
}

async function answer(url, options) {
  let response;
  try {
    response = await fetch(url, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server does not answer. Is it running?", "unreachable");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Problem(response.status, body?.error?.message ?? `The server answered ${response.status}.`, body?.error?.code);
  }
  return response;
}

export async function get(path, query, signal) {
  return (await answer(address(path, query), { headers: headers(), signal })).json();
}

export async function post(path, body) {
  const sent = headers({ "content-type": "application/json" });
  return (await answer(address(path), { method: "POST", headers: sent, body: JSON.stringify(body) })).json();
}

/** Calls `onEvent({kind})` for each event until the stream ends; comments count as signs of life. */
export async function follow(path, query, onEvent, signal) {
  const response = await answer(address(path, query), { headers: headers({ accept: "text/event-stream" }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((text) => text.startsWith("data: ")).map((text) => text.slice(6)).join("\n");
      if (data) onEvent(JSON.parse(data));
    }
  }
}
