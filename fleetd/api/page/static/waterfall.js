// One request as bars in time. A step tells how long it took, not when it began: on each machine steps follow
// one another, and helpers begin when the machine that answers has the request at hand.

import { h } from "/page/dom.js";
import { bytes, deviation, none, seconds } from "/page/units.js";

const SCALE = 1000;
// After these the machine that answers begins to read the prompt, and helpers with it.
const BEFORE = new Set(["queued", "loaded", "scored", "woken", "pulled"]);

/** The steps of a trace, of the machine that answered and of the drafter, with names for "this". */
export function stepsOf(trace) {
  const here = named(trace.steps, trace.chosen.steps, "this machine");
  const there = trace.there ? named(trace.there.steps, trace.there.chosen.steps, trace.answered_by) : [];
  const drafter = trace.drafter ?? trace.there?.drafter;
  const drafts = drafter ? named(drafter.steps ?? [], [], drafter.machine === "this" ? "this machine" : drafter.machine) : [];
  return placed([...here, ...there], drafts);
}

// Actual steps in their order, each with what was planned for it; then what was planned and did not come.
function named(actual, planned, machine) {
  const whose = (step) => (!step.machine || step.machine === "this" ? machine : step.machine);
  const left = [...planned];
  const found = actual.map((step) => {
    const at = left.findIndex((one) => one.name === step.name && whose(one) === whose(step));
    const plan = at < 0 ? null : left.splice(at, 1)[0];
    return { name: step.name, machine: whose(step), seconds: step.seconds, planned: plan?.seconds ?? null, bytes: step.n_bytes || plan?.n_bytes || 0 };
  });
  // What was planned and did not come belongs before the answer.
  const decoded = found.findIndex((step) => step.name === "decoded");
  let place = decoded < 0 ? found.length : decoded;
  for (const step of left) {
    found.splice(place++, 0, { name: step.name, machine: whose(step), seconds: null, planned: step.seconds, bytes: step.n_bytes || 0 });
  }
  return found;
}

function placed(steps, drafts) {
  const home = steps.find((step) => step.name === "decoded")?.machine ?? steps[0]?.machine ?? "this machine";
  let begin = 0;
  for (const step of steps) if (step.machine === home && BEFORE.has(step.name)) begin += step.seconds ?? 0;
  const clock = new Map([[home, 0]]);
  const found = steps.map((step) => {
    const start = clock.get(step.machine) ?? begin;
    clock.set(step.machine, start + (step.seconds ?? 0));
    return { ...step, start };
  });
  const decoding = found.find((step) => step.name === "decoded")?.start ?? begin;
  let at = decoding;
  for (const step of drafts) {
    found.push({ ...step, start: at });
    at += step.seconds ?? 0;
  }
  return found;
}

export function waterfall(trace) {
  const steps = stepsOf(trace);
  if (!steps.length) return h("p", { class: "quiet" }, "No step was measured.");
  const end = Math.max(trace.took_s ?? 0, ...steps.map((step) => step.start + Math.max(step.seconds ?? 0, step.planned ?? 0))) || 1;
  const machines = [...new Set(steps.map((step) => step.machine))];
  const x = (time_s) => ((SCALE * time_s) / end).toFixed(1);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Steps in time" },
    h("table", { class: "waterfall" },
      h("thead", null, h("tr", null,
        h("th", { scope: "col" }, "Step"),
        h("th", { scope: "col", class: "track" }, h("span", { class: "ends" }, h("span", null, "0 s"), h("span", null, seconds(end)))),
        h("th", { scope: "col", class: "number" }, "Planned"), h("th", { scope: "col", class: "number" }, "Came"),
        h("th", { scope: "col", class: "number" }, ""), h("th", { scope: "col", class: "number" }, "Travelled"))),
      machines.map((machine, at) => h("tbody", { key: machine },
        h("tr", { class: "machine" }, h("th", { scope: "rowgroup", colspan: "6" }, machine)),
        steps.filter((step) => step.machine === machine).map((step) => row(step, at, x, trace.ttft_s))))),
    h("p", { class: "quiet" }, "Filled: came. Outlined: planned. The line is the first token. Lengths are measured; beginnings follow from the order of steps."));
}

function row(step, at, x, ttft_s) {
  const least = 1.5;
  return h("tr", null,
    h("th", { scope: "row" }, step.name),
    h("td", { class: "track" },
      h("svg", { viewBox: `0 0 ${SCALE} 14`, preserveAspectRatio: "none", "aria-hidden": "true" },
        step.planned !== null && h("rect", { class: "planned", x: x(step.start), y: 0.75, width: Math.max(least, x(step.planned)), height: 12.5 }),
        step.seconds !== null && h("rect", { class: `came lane${at % 5}`, x: x(step.start), y: 3, width: Math.max(least, x(step.seconds)), height: 8 }),
        ttft_s && h("line", { class: "first", x1: x(ttft_s), x2: x(ttft_s), y1: 0, y2: 14 }))),
    h("td", { class: "number" }, seconds(step.planned)),
    h("td", { class: "number" }, step.seconds === null ? none : seconds(step.seconds)),
    h("td", { class: "number quiet" }, deviation(step.seconds, step.planned)),
    h("td", { class: "number" }, step.bytes ? bytes(step.bytes) : none));
}
