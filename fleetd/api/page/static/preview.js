// What smart prefill would keep of a prompt, before it is sent.

import { post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { redraw } from "/page/store.js";
import { count, counted, seconds } from "/page/units.js";

const TIMEOUT_MS = 600_000;
// English text in common tokenizers.
const CHARS_PER_TOKEN = 4;
/** Shorter prompts are read as fast as they are scored. */
export const LEAST_TOKENS = 2000;

/** The look at a text; null: none was taken. */
let look = null;

export function tokensOf(text) {
  return Math.ceil(text.length / CHARS_PER_TOKEN);
}

async function take(text) {
  const mine = (look = { text, waiting: true, error: null, found: null });
  redraw();
  try {
    mine.found = await post("/v1/compress", { messages: [{ role: "user", content: text }] }, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    mine.error = error.name === "TimeoutError" ? { message: "Scoring took too long.", hint: "" } : error;
  }
  mine.waiting = false;
  redraw();
}

export function closePreview() {
  look = null;
}

/** The offer to look, and what was found; nothing for a prompt that is too short to gain. */
export function preview(text) {
  if (tokensOf(text) <= LEAST_TOKENS) return null;
  const mine = look?.text === text ? look : null;
  return h("div", { class: "preview" },
    h("p", { class: "quiet" }, `About ${counted(tokensOf(text), "token")}. `,
      !mine && h("button", { type: "button", class: "plain small", onclick: () => take(text) }, "Preview what smart prefill would keep"),
      mine?.waiting && "Scoring …",
      mine?.error && h("span", { class: "why" }, mine.error.message, " ", mine.error.hint),
      mine?.found && verdict(mine.found),
      mine?.found && [" ", h("button", { type: "button", class: "plain small", onclick: () => { closePreview(); redraw(); } }, "Close")]),
    mine?.found && !mine.found.declined && marked(text, mine.found));
}

function verdict(found) {
  if (found.declined) return `All of it would be read: ${found.declined}.`;
  return `It would keep ${count(found.usage.compressed_tokens)} of ${counted(found.usage.original_tokens, "token")}; ${found.model} scored them in ${seconds(found.timings.score_ms / 1000)}.`;
}

/** A text with what is kept and what is dropped marked; ranges count code points. */
function marked(text, found) {
  const points = Array.from(text);
  const parts = [];
  let at = 0;
  for (const [first, end] of found.kept.find((one) => one.index === 0)?.spans ?? []) {
    if (first > at) parts.push(h("del", null, points.slice(at, first).join("")));
    parts.push(h("mark", null, points.slice(first, end).join("")));
    at = end;
  }
  if (at < points.length) parts.push(h("del", null, points.slice(at).join("")));
  return h("div", { class: "text selection", tabindex: "0", role: "region", "aria-label": "The prompt; struck parts would be dropped" }, parts);
}
