// Requests: what runs now, and of each past one why it took as long as it did.

import { h } from "/page/dom.js";
import { bar, short } from "/page/fleet.js";
import { redraw, refreshTraces, state } from "/page/store.js";
import { count, counted, moment, none, percent, seconds } from "/page/units.js";
import { detail, sharesOf } from "/page/request_detail.js";

/** As many are listed at a time; `first` is the place of the first of them. */
const LISTED = 50;
let first = 0;
/** What is told of an ended request stays the same: its row is made once. */
const rows = new WeakMap();

export function requestsView(id) {
  const running = [...state.requests.values()];
  // An answer is known by its id; the request of each of its choices has more behind that.
  const is = (one) => one.id === id || one.id.startsWith(`${id}-`);
  const found = id ? (state.traces ?? []).find(is) : null;
  const live = id ? running.find(is) : null;
  return h("div", { class: id ? "pair chosen" : "pair" },
    h("div", { class: "list" },
      h("section", { "aria-labelledby": "running" },
        h("h2", { id: "running" }, "Running"),
        running.length ? h("ul", { class: "rows running" }, running.map(runningRow)) : h("p", { class: "quiet" }, "Nothing runs.")),
      h("section", { "aria-labelledby": "past" }, h("h2", { id: "past" }, "Past"), pastList(found?.id))),
    id && h("article", { class: "detail", key: id, "aria-label": `Request ${id}` },
      h("p", { class: "back" }, h("a", { href: "#requests" }, "All requests")),
      found ? detail(found) : live ? h("ul", { class: "rows running" }, runningRow(live))
        : h("p", { class: "quiet" }, state.traces === null ? "Waiting for the requests …" : "This request is not among those that are kept, or ends just now.")));
}

function runningRow(request) {
  const { plan } = request;
  return h("li", { key: request.id },
    h("div", null,
      h("h3", null, short(request.model), h("small", null, ` ${request.id.slice(-8)}`, request.asked_by && ` for ${request.asked_by}`)),
      h("p", null, request.stage || "waiting for a place",
        request.total > 0 && request.stage === "reading the prompt" && `: ${count(request.done)} of ${counted(request.total, "token")}`,
        request.total > 0 && request.stage !== "reading the prompt" && `: ${percent(request.done, request.total)}`,
        request.completion_tokens > 0 && `: ${counted(request.completion_tokens, "token")}`),
      request.total > 0 ? bar(request.done, request.total, request.stage) : h("div", { class: "bar" })),
    h("div", null,
      h("p", { class: "quiet" }, `since ${seconds(request.age_s)}`, request.ttft_s !== null && ` · first token after ${seconds(request.ttft_s)}`),
      request.prompt_tokens > 0 && h("p", { class: "quiet" }, promptText(request))),
    h("div", { class: "parts" }, parts(plan, request)));
}

// Machine by machine: its share, and how much of it is done where that can be told.
function parts(plan, request) {
  const shares = sharesOf(plan);
  const reading = request.stage === "reading the prompt";
  const past = request.ttft_s !== null;
  return h("ul", { class: "plainlist" }, shares.map((share) =>
    h("li", { key: share.machine }, h("span", { class: "name" }, share.machine), " ", h("span", { class: "quiet" }, share.what, past && share.helper ? " · done" : reading && share.helper ? " · at work" : ""))));
}

function pastList(chosen) {
  if (state.tracesError && state.traces === null) {
    return h("p", { class: "trouble" }, state.tracesError.message, " ", h("button", { onclick: () => refreshTraces() }, "Try again"));
  }
  if (state.traces === null) return h("p", { class: "quiet" }, "Waiting for the requests …");
  if (!state.traces.length) return h("p", { class: "quiet" }, "No request has come yet. ", h("a", { href: "#chat" }, "Ask something"), ".");
  if (first >= state.traces.length) first = 0;
  const shown = state.traces.slice(first, first + LISTED);
  const older = state.traces.length > first + LISTED || (!state.allTraces && state.traces.length >= LISTED);
  return [
    h("table", { class: "past" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "When"), h("th", { scope: "col" }, "Model"),
        h("th", { scope: "col", class: "number" }, "Prompt"), h("th", { scope: "col" }, "Read by"),
        h("th", { scope: "col", class: "number" }, "Planned"), h("th", { scope: "col", class: "number" }, "Came"),
        h("th", { scope: "col", class: "number wide" }, "First token"), h("th", { scope: "col" }, "Outcome"))),
      h("tbody", null, shown.map((trace) => pastRow(trace, trace.id === chosen)))),
    (older || first > 0) && h("p", { class: "buttons" },
      h("button", { key: "newer", disabled: first === 0, onclick: () => turn(-LISTED) }, "Newer"),
      h("button", { key: "older", disabled: !older, onclick: () => turn(LISTED) }, "Older")),
  ];
}

async function turn(by) {
  if (by > 0 && !state.allTraces) await refreshTraces(true);
  if (first + by < state.traces.length) first = Math.max(0, first + by);
  redraw();
}

function pastRow(trace, chosen) {
  if (chosen) return drawnRow(trace, true);
  if (!rows.has(trace)) rows.set(trace, drawnRow(trace, false));
  return rows.get(trace);
}

function drawnRow(trace, chosen) {
  return h("tr", { key: `${trace.id} ${trace.at_s}`, class: chosen ? "chosen" : null },
    h("td", null, h("a", { href: `#requests/${encodeURIComponent(trace.id)}`, "aria-label": `Request ${trace.id.slice(-8)}, ${moment(trace.at_s)}`, "aria-current": chosen ? "true" : null }, moment(trace.at_s))),
    h("td", { class: "model" }, short(trace.model)),
    h("td", { class: "number" }, trace.prompt_tokens ? count(trace.prompt_tokens) : none),
    h("td", null, readBy(trace)),
    h("td", { class: "number" }, seconds(trace.chosen.predicted_s)),
    h("td", { class: "number" }, seconds(trace.prefill_s)),
    h("td", { class: "number wide" }, seconds(trace.ttft_s)),
    h("td", { class: `outcome ${trace.outcome}` }, trace.outcome));
}

function readBy(trace) {
  if (trace.answered_by) return trace.answered_by;
  const others = trace.chosen.nodes.filter((node) => node !== "this");
  return others.length ? `${others[0]}${others.length > 1 ? ` +${others.length - 1}` : ""} + this` : "this";
}

function promptText({ prompt_tokens, cached_tokens, kept_tokens }) {
  return [counted(prompt_tokens, "token"), cached_tokens > 0 && `${count(cached_tokens)} known already`, kept_tokens > 0 && `${count(kept_tokens)} kept`].filter(Boolean).join(", ");
}
