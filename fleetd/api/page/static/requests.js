// Requests: what runs now, and of each past one why it took as long as it did.

import { h } from "/page/dom.js";
import { bar, short } from "/page/fleet.js";
import { pastList } from "/page/request_list.js";
import { hereName, state } from "/page/store.js";
import { count, counted, percent, seconds } from "/page/units.js";
import { detail, sharesOf } from "/page/request_detail.js";

// What the steps count; of others the share that is done is told.
const UNITS = { "reading the prompt": "token", "making vectors": "text", "scoring documents": "document" };

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
      h("h3", null, short(request.model), h("small", null, ` ${request.id.slice(-8)}`, (request.asked_by || request.client) && ` for ${request.asked_by || request.client}`)),
      h("p", null, request.stage || "waiting for a place",
        request.total > 0 && (UNITS[request.stage]
          ? `: ${count(request.done)} of ${counted(request.total, UNITS[request.stage])}`
          : `: ${percent(request.done, request.total)}`),
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
  // Nothing is answered in words: each machine computes texts.
  const texts = request.stage in UNITS && !reading;
  return h("ul", { class: "plainlist" }, shares.map((share) =>
    h("li", { key: share.machine }, h("span", { class: "name" }, share.machine === "this machine" ? hereName() || share.machine : share.machine), " ", h("span", { class: "quiet" }, texts ? "computes texts" : share.what, past && share.helper ? " · done" : reading && share.helper ? " · at work" : ""))));
}

function promptText({ prompt_tokens, cached_tokens, kept_tokens }) {
  return [counted(prompt_tokens, "token"), cached_tokens > 0 && `${count(cached_tokens)} not read again`, kept_tokens > 0 && `${count(kept_tokens)} kept`].filter(Boolean).join(", ");
}
