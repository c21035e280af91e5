// How many tokens a second are written now, by what running requests have written since a moment ago.

import { onChange, state } from "/page/store.js";

const WINDOW_MS = 4000;
const SAMPLES = 60;
/** By request: [when, tokens] of the last moments, oldest first. */
const seen = new Map();
/** The newest paces of this machine, for a small curve. */
export const paces = [];
let sampled = 0;

onChange((change) => {
  const now = performance.now();
  if (change.full) seen.clear();
  for (const [id, request] of Object.entries(change.requests ?? {})) {
    if (request === null) seen.delete(id);
    else if (request.completion_tokens > 0) seen.set(id, [...(seen.get(id) ?? []), [now, request.completion_tokens]].filter(([at]) => now - at < WINDOW_MS));
  }
});

/** Tokens per second of one running request; 0 until two reports have come. */
function paceOf(id) {
  const known = seen.get(id);
  if (!known || known.length < 2) return 0;
  const [[begun, before], [ended, after]] = [known[0], known[known.length - 1]];
  return ended > begun ? (1000 * (after - before)) / (ended - begun) : 0;
}

/** The machine that writes a running request's answer: "" is this one. */
function writer(request) {
  return request.plan.kind === "remote" ? (request.plan.nodes[0] ?? "") : "";
}

/** Tokens per second that a machine writes for requests of this one; `name` "" is this machine. */
export function pace(name) {
  const found = [...state.requests.values()].filter((request) => writer(request) === name).reduce((sum, request) => sum + paceOf(request.id), 0);
  if (name === "" && performance.now() - sampled > 900) {
    sampled = performance.now();
    paces.push(found);
    if (paces.length > SAMPLES) paces.shift();
  }
  return found;
}
