// The list of past requests: what each waited for, where it ran, and what came of it.

import { h } from "/page/dom.js";
import { short } from "/page/fleet.js";
import { hereName, redraw, refreshTraces, state } from "/page/store.js";
import { count, counted, moment, none, percent, rate, seconds } from "/page/units.js";

/** As many are listed at a time; `first` is the place of the first of them. */
const LISTED = 50;
const RESULTS = { local: "answered", remote: "answered", shared: "read together", smart: "shortened", spread: "computed together", fallback: "ended alone", cancelled: "cancelled", failed: "failed" };
/** Longer than planned by more than this counts as a miss. */
const MISS = 1.5;
let first = 0;
let filter = "";
/** What is told of an ended request stays the same: its row is made once for a scale of the bars. */
const rows = new WeakMap();

/** Seconds to the first token as planned, counted from the arrival; null if nothing was planned. */
export function plannedFirst(trace) {
  if (trace.planned_ttft_s !== undefined) return trace.planned_ttft_s;
  const planned = trace.chosen.predicted_s;
  if (planned === null || planned === undefined) return null;
  // The plan begins with the decision.
  return planned + Math.max(0, (trace.ttft_s ?? 0) - (trace.prefill_s ?? 0));
}

/** Names of the machines that had a part in it, the one that answered last. */
export function machinesOf(trace) {
  const here = hereName() || "this machine";
  const named = (node) => (node === "this" ? here : node);
  if (trace.answered_by) {
    const helpers = (trace.there?.chosen.nodes ?? []).filter((node) => node !== "this").map((node) => (node === here ? here : node));
    return [...new Set([...helpers, trace.answered_by])];
  }
  return [...new Set((trace.chosen.nodes.length ? trace.chosen.nodes : ["this"]).map(named))];
}

function clientOf(trace) {
  return trace.asked_by || trace.client || "";
}

function found() {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return state.traces;
  return state.traces.filter((trace) => {
    const text = [trace.id, trace.model, clientOf(trace), ...machinesOf(trace), trace.outcome, RESULTS[trace.outcome], trace.reason, trace.code, moment(trace.at_s)].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

export function pastList(chosen) {
  if (state.tracesError && state.traces === null) {
    return h("p", { class: "trouble" }, state.tracesError.message, " ", h("button", { onclick: () => refreshTraces() }, "Try again"));
  }
  if (state.traces === null) return h("p", { class: "quiet" }, "Waiting for the requests …");
  if (!state.traces.length) return h("p", { class: "quiet" }, "No request has come yet. ", h("a", { href: "#chat" }, "Ask something"), ".");
  const all = found();
  if (first >= all.length) first = 0;
  const shown = all.slice(first, first + LISTED);
  const older = all.length > first + LISTED || (!state.allTraces && state.traces.length >= LISTED);
  return [
    h("p", { class: "inline filter" }, h("label", { for: "filter", class: "unseen" }, "Filter"),
      h("input", { id: "filter", type: "search", "data-filter": "", value: filter, placeholder: "Filter: model, client, machine, result", autocomplete: "off", spellcheck: "false", oninput: filtered }),
      filter.trim() && h("span", { class: "quiet", role: "status" }, `${count(all.length)} of ${counted(state.traces.length, "request")}`)),
    shown.length ? table(shown, chosen) : h("p", { class: "quiet" }, "No request has all of these words."),
    (older || first > 0) && h("p", { class: "buttons" },
      h("button", { key: "newer", disabled: first === 0, onclick: () => turn(-LISTED) }, "Newer"),
      h("button", { key: "older", disabled: !older, onclick: () => turn(LISTED) }, "Older")),
  ];
}

function filtered(event) {
  const before = filter;
  filter = event.target.value;
  first = 0;
  if (!before && filter && !state.allTraces) refreshTraces(true);
  redraw();
}

async function turn(by) {
  if (by > 0 && !state.allTraces) await refreshTraces(true);
  if (first + by < found().length) first = Math.max(0, first + by);
  redraw();
}

function table(shown, chosen) {
  const scale = {
    waited: Math.max(...shown.map((trace) => Math.max(trace.ttft_s ?? 0, plannedFirst(trace) ?? 0)), 0.001),
    prompt: Math.max(...shown.map((trace) => trace.prompt_tokens), 1),
  };
  const head = (name, more) => h("th", { scope: "col", class: more ?? null }, name);
  return h("table", { class: "past" },
    h("thead", null, h("tr", null, head("Time"), head("Client", "wide"), head("Model"), head("Prompt"), head("Waited"), head("Speed", "number wide"), head("Machines", "wide"), head("Result"))),
    h("tbody", null, shown.map((trace) => pastRow(trace, scale, trace.id === chosen))));
}

function pastRow(trace, scale, chosen) {
  const made = `${scale.waited} ${scale.prompt} ${chosen} ${hereName()}`;
  const known = rows.get(trace);
  if (known?.made === made) return known.row;
  const row = drawnRow(trace, scale, chosen);
  rows.set(trace, { made, row });
  return row;
}

function drawnRow(trace, scale, chosen) {
  const href = `#requests/${encodeURIComponent(trace.id)}`;
  const answered_s = trace.took_s !== null && trace.ttft_s !== null ? trace.took_s - trace.ttft_s : 0;
  const together = machinesOf(trace).join(" + ");
  return h("tr", { key: `${trace.id} ${trace.at_s}`, class: chosen ? "chosen" : null, onclick: (event) => clicked(event, href) },
    h("td", { class: "when" }, h("a", { href, "data-row": "", "aria-label": `Request ${trace.id.slice(-8)}, ${moment(trace.at_s)}`, "aria-current": chosen ? "true" : null }, moment(trace.at_s))),
    h("td", { class: "client wide" }, clientOf(trace) || none),
    h("td", { class: "model" }, short(trace.model)),
    h("td", { class: "prompt" }, trace.prompt_tokens ? [h("span", { class: "figure" }, count(trace.prompt_tokens)), promptBar(trace, scale.prompt)] : none),
    h("td", { class: "waited" }, waited(trace, scale.waited)),
    h("td", { class: "number speed wide" }, rate(trace.completion_tokens - 1, answered_s)),
    h("td", { class: "machines wide", title: together }, together),
    h("td", { class: `result ${trace.outcome}` }, result(trace)));
}

// Text of a row can be selected: that is no click on the row.
function clicked(event, href) {
  if (event.target.closest("a") || getSelection().toString()) return;
  location.hash = href;
}

function promptBar(trace, most) {
  const width = (tokens) => ((100 * tokens) / most).toFixed(1);
  const cached = trace.cached_tokens > 0 ? `${count(trace.cached_tokens)} not read again` : "all of it read";
  return h("svg", { class: "cell", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": cached },
    h("title", null, cached),
    h("rect", { class: "whole", width: width(trace.prompt_tokens), height: 8 }),
    trace.cached_tokens > 0 && h("rect", { class: "cached", width: width(trace.cached_tokens), height: 8 }));
}

function waited(trace, most) {
  const planned = plannedFirst(trace);
  // Vectors and scores come at the end: there is no first token.
  if (trace.texts) return h("span", { class: "figure" }, seconds(trace.took_s));
  if (trace.ttft_s === null) return h("span", { class: "quiet" }, "no token");
  const late = trace.late ?? (planned !== null && trace.ttft_s > MISS * planned && trace.ttft_s - planned > 0.1);
  const label = planned === null ? "not planned" : `planned ${seconds(planned)}`;
  const x = planned === null ? 0 : (100 * planned) / most;
  return [
    h("span", { class: late ? "figure late" : "figure" }, seconds(trace.ttft_s)),
    h("svg", { class: "cell", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label },
      h("title", null, label),
      h("rect", { class: late ? "actual late" : "actual", width: ((100 * trace.ttft_s) / most).toFixed(1), y: 2, height: 4 }),
      planned !== null && h("line", { class: "tick", x1: x.toFixed(1), x2: x.toFixed(1), y1: 0, y2: 8 }))];
}

function result(trace) {
  const { outcome } = trace;
  const word = RESULTS[outcome] ?? outcome;
  if (outcome === "cancelled") return h("b", null, word);
  if (outcome === "failed") return [h("b", null, word), trace.reason && h("span", { class: "because", title: trace.reason }, trace.reason)];
  if (trace.texts) return [word, h("span", { class: "quiet wide" }, `, ${counted(trace.texts.texts ?? 0, trace.texts.route === "rerank" ? "document" : "text")}`)];
  const left_out = trace.kept_tokens > 0 && ` to ${percent(trace.kept_tokens, trace.prompt_tokens)}`;
  return [word, left_out, h("span", { class: "quiet wide" }, `, ${counted(trace.completion_tokens, "token")}`)];
}
