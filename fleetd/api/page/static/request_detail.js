// One past request: where its time went, who did what, and which ways there were.

import { h } from "/page/dom.js";
import { short } from "/page/fleet.js";
import { bitsOf, bytes, count, counted, deviation, moment, none, percent, rate, seconds } from "/page/units.js";
import { miss, travelled, waterfall } from "/page/waterfall.js";

const OUTCOMES = {
  spread: "computed by several machines", fallback: "begun together, ended here alone", local: "computed here",
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
    smart: (at, node) => (node === "this" || nodes.length === 1 ? "reads what is kept" : "scores the prompt"), local: () => "reads and answers", spread: () => "computes some of the texts" };
  const role = roles[kind] ?? (() => kind);
  return (nodes.length ? nodes : ["this"]).map((node, at) => ({ machine: name(node), helper: node !== "this", what: role(at, node) }));
}

export function detail(trace) {
  const drafts = trace.speculation ?? trace.there?.speculation;
  const crossed = travelled(trace);
  const answered_s = trace.took_s !== null && trace.ttft_s !== null ? trace.took_s - trace.ttft_s : 0;
  const off = miss(trace.ttft_s, trace.planned_ttft_s);
  return [
    h("h2", null, short(trace.model), " ", h("small", { class: `outcome ${trace.late ? "late" : trace.outcome}` }, outcomeOf(trace))),
    trace.summary && h("p", { class: trace.late ? "summary late" : "summary" }, trace.summary),
    h("p", { class: "quiet id" }, `${trace.id} · ${moment(trace.at_s)}`, trace.asked_by && ` · asked by ${trace.asked_by}`, [trace.exactness, ...bitsOf(trace)].filter(Boolean).map((label) => ` · ${label}`)),
    (trace.reason || trace.code) && h("p", { class: "why" }, trace.reason, trace.code && ` (${trace.code})`),
    trace.earlier.map((attempt, at) => h("p", { key: `tried ${at}`, class: "why" },
      `Tried first on ${attempt.answered_by || named(trace, "this")}, for ${seconds(attempt.took_s)}: ${attempt.reason || attempt.code}`)),
    trace.texts ? textFigures(trace) : h("dl", { class: "figures" },
      fact("First token", seconds(trace.ttft_s), trace.planned_ttft_s === null ? "not planned" : [`${seconds(trace.planned_ttft_s)} planned`, off && `, ${off}`], trace.late),
      fact("Prompt", count(trace.prompt_tokens), ["tokens", trace.cached_tokens > 0 && `, ${count(trace.cached_tokens)} not read again`, trace.kept_tokens > 0 && `, ${count(trace.prompt_tokens - trace.kept_tokens)} dropped`]),
      fact("Answer", count(trace.completion_tokens), `tokens, ${rate(trace.completion_tokens - 1, answered_s)}`),
      fact("Alone", trace.alone_s === null ? none : `about ${seconds(trace.alone_s)}`, `to the first token on ${named(trace, "this")}`)),
    h("section", { "aria-labelledby": "steps" }, h("h3", { id: "steps" }, "Where the time went"), waterfall(trace)),
    h("section", { "aria-labelledby": "who" }, h("h3", { id: "who" }, "Who did what"),
      h("ul", { class: "plainlist" },
        trace.texts ? machineItems(trace) : sharesOf(trace.chosen).map((share) => h("li", { key: share.machine }, h("b", null, share.helper ? share.machine : named(trace, "this")), ` ${share.what}`)),
        trace.there && sharesOf(trace.there.chosen).length > 1 && h("li", null, `On ${trace.answered_by}: `, sharesOf(trace.there.chosen).map((one) => `${one.helper ? one.machine : trace.answered_by} ${one.what}`).join(", ")),
        trace.cached_tokens > 0 && h("li", null, `${counted(trace.cached_tokens, "token")} not read again`),
        trace.kept_tokens > 0 && h("li", null, `${count(trace.kept_tokens)} of ${counted(trace.prompt_tokens, "token")} kept, ${percent(trace.prompt_tokens - trace.kept_tokens, trace.prompt_tokens)} dropped by smart prefill`),
        crossed > 0 && h("li", null, `${bytes(crossed)} travelled between machines`),
        trace.verified_tokens > 0 && h("li", null, `${counted(trace.verified_tokens, "token")} of the helpers' work verified`),
        drafts && draftItems(drafts, trace.drafter),
        trace.drafter?.code && h("li", { class: "why" }, `${trace.drafter.model} on ${trace.drafter.machine} did not draft to the end: ${trace.drafter.reason} (${trace.drafter.code})`),
        trace.capped.map((text, at) => h("li", { key: `capped ${at}`, class: "why" }, text)))),
    trace.losers.length > 0 && alternatives(trace),
    h("p", { class: "buttons" }, h("button", { onclick: (event) => copyReport(event.currentTarget, trace) }, "Copy as report")),
  ];
}

const textsOf = (trace, number) => counted(number ?? 0, trace.texts.route === "rerank" ? "document" : "text");

/** Of a request for vectors or scores. */
function textFigures(trace) {
  return h("dl", { class: "figures" },
    fact("Took", seconds(trace.took_s)),
    fact(trace.texts.route === "rerank" ? "Documents" : "Texts", count(trace.texts.texts ?? 0), "asked for"),
    fact("Tokens", count(trace.prompt_tokens), rate(trace.prompt_tokens, trace.took_s)),
    fact("Machines", count((trace.texts.machines ?? []).filter((machine) => machine.texts).length)));
}

/** How much each machine computed, and why one was left out. */
function machineItems(trace) {
  return (trace.texts.machines ?? []).map((machine, at) => h("li", { key: at, class: machine.code ? "why" : null },
    h("b", null, named(trace, machine.name)), ` ${textsOf(trace, machine.texts)}, ${counted(machine.tokens ?? 0, "token")}`,
    machine.parts > 0 && ` in ${counted(machine.parts, "part")}, ${seconds(machine.computed_s ?? 0)}, ${rate(machine.tokens ?? 0, machine.computed_s ?? 0)}`,
    machine.loaded_s > 0 && `; loaded the model for ${seconds(machine.loaded_s)}`,
    machine.code && `; then left out: ${machine.reason} (${machine.code})`));
}

/** What came of it, and with how many machines; a late one is not shown as a success. */
function outcomeOf(trace) {
  const machines = new Set(trace.chosen.nodes).size;
  const said = trace.outcome === "shared" ? `read by ${count(machines)} machines` : OUTCOMES[trace.outcome] ?? trace.outcome;
  if (!trace.late || !trace.planned_ttft_s) return said;
  return `${said}; ${(trace.ttft_s / trace.planned_ttft_s).toFixed(1)}x the planned time`;
}

/** The name of a machine: "this" is the one that was asked. */
function named(trace, node) {
  return node === "this" ? trace.machine || "this machine" : node;
}

/** The request as text: what the page shows of it, and every step. */
export function report(trace) {
  const steps = trace.steps.map((step) => [`${(step.begin_s ?? 0).toFixed(3)}-${(step.end_s ?? 0).toFixed(3)} s`, step.machine, step.name,
    `${(step.seconds ?? 0).toFixed(3)} s`, step.planned_s === undefined || step.planned_s === null ? "" : `planned ${step.planned_s.toFixed(3)} s`].filter(Boolean).join("  "));
  return [trace.summary, `${trace.id}, ${new Date(trace.at_s * 1000).toISOString()}, ${trace.model}, ${[`${trace.outcome} ${trace.exactness}`, ...bitsOf(trace)].join(", ")}`,
    trace.reason && `${trace.reason} (${trace.code})`, `${trace.prompt_tokens} prompt tokens, ${trace.cached_tokens} not read again, ${trace.completion_tokens} written`,
    "", ...steps].filter((line) => line !== "" || steps.length).filter((line) => typeof line === "string").join("\n");
}

async function copyReport(button, trace) {
  try {
    await navigator.clipboard.writeText(report(trace));
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow it";
  }
}

function fact(name, value, more, late) {
  return h("div", { class: late ? "late" : null }, h("dt", null, name), h("dd", null, h("b", null, value), " ", h("small", null, more)));
}

function draftItems(drafts, drafter) {
  const saved = drafts.saved_s ?? 0;
  return h("li", null, `Drafts, up to ${drafts.width ?? 1} tokens per pass: `,
    Object.entries(drafts.sources ?? {}).map(([source, found]) =>
      `${source === "drafter" && drafter ? `${drafter.model} on ${drafter.machine}` : source} ${count(found.accepted ?? 0)} of ${count(found.drafted ?? 0)} right`).join(", ") || "none verified",
    `; ${saved >= 0 ? "saved" : "lost"} ${seconds(Math.abs(saved))}`);
}

/** The code of a way for which a helper would have to load the model first. */
const NOT_NOW = "cold";

function alternatives(trace) {
  const later = trace.losers.filter((option) => option.code === NOT_NOW);
  const alone = [trace.chosen, ...trace.losers].find((option) => option.kind === "local")?.predicted_s;
  return h("section", { "aria-labelledby": "alternatives" }, h("h3", { id: "alternatives" }, "Alternatives"),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Alternatives" },
      h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Way"), h("th", { scope: "col" }, "Machines"), h("th", { scope: "col", class: "number" }, "First token"),
          h("th", { scope: "col", class: "number" }, "Against alone"), h("th", { scope: "col" }, "Why not"))),
        h("tbody", { key: "now" }, trace.losers.filter((option) => option.code !== NOT_NOW).map((option, at) => h("tr", { key: at },
          h("td", null, wayOf(option)),
          h("td", null, option.nodes.map((node) => named(trace, node)).join(" + ")),
          h("td", { class: "number" }, seconds(option.predicted_s)),
          h("td", { class: "number quiet" }, option.kind === "local" ? none : deviation(option.predicted_s, alone)),
          h("td", { class: "reason" }, option.reason || option.code)))),
        later.length > 0 && h("tbody", { key: "later" },
          h("tr", null, h("th", { scope: "rowgroup", colspan: "5", class: "quiet" }, "Not now, as a machine would have to load the model first")),
          later.map((option, at) => h("tr", { key: at },
            h("td", null, wayOf(option)),
            h("td", null, option.nodes.map((node) => named(trace, node)).join(" + ")),
            h("td", { class: "number" }, none), h("td", { class: "number quiet" }, none),
            h("td", { class: "reason" }, option.reason)))))));
}

function wayOf({ kind, prefill, form }) {
  if (kind === "any") return none;
  const named = form ? `${kind} ${form}` : kind;
  return prefill && prefill !== "local" ? `${named} + ${prefill}` : named;
}
