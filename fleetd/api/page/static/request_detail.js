// One past request: where its time went, who did what, and which ways there were.

import { h } from "/page/dom.js";
import { short } from "/page/fleet.js";
import { bytes, count, counted, deviation, moment, none, percent, rate, seconds } from "/page/units.js";
import { stepsOf, waterfall } from "/page/waterfall.js";

const OUTCOMES = {
  shared: "read together, as planned", fallback: "begun together, ended here alone", local: "computed here",
  smart: "a part of the prompt was left out", remote: "answered by another machine", cancelled: "cancelled", failed: "failed",
};
/** Who computes what: [{machine, what, helper}]. */
export function sharesOf(option) {
  const name = (node) => (node === "this" ? "this machine" : node);
  const { nodes = [], cuts = [], kind } = option;
  if ((kind === "layers" || kind === "tokens") && cuts.length === nodes.length + 1) {
    return nodes.map((node, at) => ({ machine: name(node), helper: node !== "this",
      what: cuts[at + 1] > cuts[at] ? `${kind} ${count(cuts[at])} to ${count(cuts[at + 1] - 1)}` : "sends and receives" }));
  }
  const roles = { remote: (at) => (at === 0 ? "answers" : "helps"), whole: (at, node) => (node === "this" ? "writes the answer" : "reads all of the prompt"),
    smart: (at, node) => (node === "this" || nodes.length === 1 ? "reads what is kept" : "scores the prompt"), local: () => "reads and answers" };
  const role = roles[kind] ?? (() => kind);
  return (nodes.length ? nodes : ["this"]).map((node, at) => ({ machine: name(node), helper: node !== "this", what: role(at, node) }));
}

export function detail(trace) {
  const drafts = trace.speculation ?? trace.there?.speculation;
  const travelled = stepsOf(trace).reduce((sum, step) => sum + (step.seconds === null ? 0 : step.bytes), 0);
  const answered_s = trace.took_s !== null && trace.ttft_s !== null ? trace.took_s - trace.ttft_s : 0;
  return [
    h("h2", null, short(trace.model), " ", h("small", { class: `outcome ${trace.outcome}` }, OUTCOMES[trace.outcome] ?? trace.outcome)),
    h("p", { class: "quiet id" }, `${trace.id} · ${moment(trace.at_s)}`, trace.asked_by && ` · asked by ${trace.asked_by}`, trace.exactness && ` · ${trace.exactness}`),
    (trace.reason || trace.code) && h("p", { class: "why" }, trace.reason, trace.code && ` (${trace.code})`),
    trace.earlier.map((attempt, at) => h("p", { key: `tried ${at}`, class: "why" },
      `Tried first on ${attempt.answered_by || "this machine"}, for ${seconds(attempt.took_s)}: ${attempt.reason || attempt.code}`)),
    h("dl", { class: "figures" },
      fact("First token", seconds(trace.ttft_s), "after it came"),
      fact("Prompt", count(trace.prompt_tokens), ["tokens", trace.cached_tokens > 0 && `, ${count(trace.cached_tokens)} restored`, trace.kept_tokens > 0 && `, ${count(trace.prompt_tokens - trace.kept_tokens)} dropped`]),
      fact("Prefill", seconds(trace.prefill_s), trace.chosen.predicted_s === null ? "not planned" : `${seconds(trace.chosen.predicted_s)} planned, ${deviation(trace.prefill_s, trace.chosen.predicted_s)}`),
      fact("Answer", count(trace.completion_tokens), `tokens, ${rate(trace.completion_tokens - 1, answered_s)}`)),
    h("section", { "aria-labelledby": "steps" }, h("h3", { id: "steps" }, "Where the time went"), waterfall(trace)),
    h("section", { "aria-labelledby": "who" }, h("h3", { id: "who" }, "Who did what"),
      h("ul", { class: "plainlist" },
        sharesOf(trace.chosen).map((share) => h("li", { key: share.machine }, h("b", null, share.machine), ` ${share.what}`)),
        trace.there && sharesOf(trace.there.chosen).length > 1 && h("li", null, `On ${trace.answered_by}: `, sharesOf(trace.there.chosen).map((one) => `${one.machine === "this machine" ? trace.answered_by : one.machine} ${one.what}`).join(", ")),
        trace.cached_tokens > 0 && h("li", null, `${counted(trace.cached_tokens, "token")} restored from the prefix cache`),
        trace.kept_tokens > 0 && h("li", null, `${count(trace.kept_tokens)} of ${counted(trace.prompt_tokens, "token")} kept, ${percent(trace.prompt_tokens - trace.kept_tokens, trace.prompt_tokens)} dropped by smart prefill`),
        travelled > 0 && h("li", null, `${bytes(travelled)} travelled between machines`),
        trace.verified_tokens > 0 && h("li", null, `${counted(trace.verified_tokens, "token")} of the helpers' work verified`),
        drafts && draftItems(drafts, trace.drafter),
        trace.drafter?.code && h("li", { class: "why" }, `${trace.drafter.model} on ${trace.drafter.machine} did not draft to the end: ${trace.drafter.reason} (${trace.drafter.code})`),
        trace.capped.map((text, at) => h("li", { key: `capped ${at}`, class: "why" }, text)))),
    trace.losers.length > 0 && refused(trace),
  ];
}

function fact(name, value, more) {
  return h("div", null, h("dt", null, name), h("dd", null, h("b", null, value), " ", h("small", null, more)));
}

function draftItems(drafts, drafter) {
  const saved = drafts.saved_s ?? 0;
  return h("li", null, `Drafts, up to ${drafts.width ?? 1} tokens per pass: `,
    Object.entries(drafts.sources ?? {}).map(([source, found]) =>
      `${source === "drafter" && drafter ? `${drafter.model} on ${drafter.machine}` : source} ${count(found.accepted ?? 0)} of ${count(found.drafted ?? 0)} right`).join(", ") || "none verified",
    `; ${saved >= 0 ? "saved" : "lost"} ${seconds(Math.abs(saved))}`);
}

function refused(trace) {
  const alone = [trace.chosen, ...trace.losers].find((option) => option.kind === "local")?.predicted_s;
  return h("section", { "aria-labelledby": "refused" }, h("h3", { id: "refused" }, "Ways that were refused"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ways that were refused" },
      h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Way"), h("th", { scope: "col" }, "Machines"), h("th", { scope: "col", class: "number" }, "Price"),
          h("th", { scope: "col", class: "number" }, "Against alone"), h("th", { scope: "col" }, "Why not"))),
        h("tbody", null, trace.losers.map((option, at) => h("tr", { key: at },
          h("td", null, option.kind === "any" ? none : option.prefill && option.prefill !== "local" ? `${option.kind} + ${option.prefill}` : option.kind),
          h("td", null, option.nodes.map((node) => (node === "this" ? "this machine" : node)).join(" + ")),
          h("td", { class: "number" }, seconds(option.predicted_s)),
          h("td", { class: "number quiet" }, option.kind === "local" ? none : deviation(option.predicted_s, alone)),
          h("td", { class: "reason" }, option.reason || option.code)))))));
}
