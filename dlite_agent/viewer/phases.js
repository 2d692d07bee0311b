// Names and order of what is drawn, and what each thing means.

/** Lanes from top to bottom. `always` ones are drawn even when empty, so that sessions look alike. */
export const LANES = [
  { id: "queue", height: 16, always: true },
  { id: "restore", height: 16, always: true },
  { id: "prefill", height: 18, always: true },
  { id: "decode", height: 30, always: true, also: ["mask"] },
  { id: "accepted", height: 34, always: true, strip: true },
  { id: "model", height: 24 },
  { id: "stream", height: 14 },
  { id: "tool", height: 26, always: true },
  { id: "client", height: 14, always: true, spare: true },
  { id: "other", height: 14, spare: true },
  { id: "context", height: 34, always: true, strip: true, spare: true },
];

export const PARTS = ["draft", "verify", "commit"];

export const MEANING = {
  queue: "waiting for admission",
  restore: "bringing the session's state back",
  prefill: "reading the tokens that are new",
  decode: "draft, verify, commit rounds",
  mask: "token masks of a grammar",
  accepted: "drafts accepted, by round",
  model: "a model call whose inside the log does not tell",
  stream: "handing text to the client",
  tool: "at least one tool runs",
  client: "nobody works: the next request has not come",
  outage: "the server was down",
  other: "inside a turn, explained by no event",
  context: "tokens in the session",
};

/** Phases in the order of a bar that shows them side by side. */
export const ORDER = ["queue", "restore", "prefill", "decode", "mask", "stream", "model", "tool", "client", "outage", "other"];

/** Phases that are nobody's work. */
export const IDLE = new Set(["client", "outage"]);
