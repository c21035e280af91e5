// What the fleet was good for today, in one line.

import { get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { onChange, redraw, state } from "/page/store.js";
import { count, counted, none, seconds } from "/page/units.js";

let today = null;
let trouble = null;
// Whether a request has ended since the figures were fetched.
let stale = true;
let asking = false;

onChange((change) => {
  if (change.full || change.traces) stale = true;
});

async function refresh() {
  stale = false;
  asking = true;
  try {
    today = (await get("/fleet/v1/usage?days=1")).totals;
    trouble = null;
  } catch (error) {
    trouble = error;
  }
  asking = false;
  redraw();
}

export function gainLine() {
  if (stale && !asking && state.link === "live") refresh();
  return h("p", { class: "gain" }, today === null ? (trouble ? trouble.message : `Today ${none}`) : gainOf(today));
}

/** "Today 18 requests, 2 read together; 15 s saved; 2,400 tokens not read again" */
export function gainOf(totals) {
  if (!totals.requests) return "No request today.";
  const requests = [counted(totals.requests, "request"), totals.shared > 0 && `${count(totals.shared)} read together`, totals.failed > 0 && `${count(totals.failed)} failed`];
  // What took longer than expected is said as well.
  const time = Math.abs(totals.saved_s) >= 0.05 && `${seconds(Math.abs(totals.saved_s))} ${totals.saved_s > 0 ? "saved" : "lost"}`;
  const tokens = totals.cached_tokens > 0 && `${counted(totals.cached_tokens, "token")} not read again`;
  return `Today ${[requests.filter(Boolean).join(", "), time, tokens].filter(Boolean).join("; ")}.`;
}
