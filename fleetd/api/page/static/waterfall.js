// One request as bars in time: the phases, then a lane for each machine. Begins, ends and what belongs to what
// come from the daemon, by the clock of the machine that was asked.

import { h } from "/page/dom.js";
import { redraw } from "/page/store.js";
import { bytes, count, deviation, none, seconds } from "/page/units.js";

const SCALE = 1000;
const PHASES = ["waiting", "loading", "reading", "writing"];
/** Of the request's time; what took less is folded. */
const LEAST = 0.01;
/** Traces whose short steps are shown as well. */
const unfolded = new Set();

const RECEIVING = new Set(["waited", "fetched"]);
const HOW = "Point at a step, or move to it with the Tab key, to read what it is.";
/** The explanation that is shown. */
let explained = HOW;

const WORDS = {
  waiting: "No machine worked on the request yet: it was placed, tokenized, sent, or other requests came first.",
  loading: "The model was fetched or loaded first.",
  reading: "The prompt was read: from caches, by one machine or by several. It ends with the first token.",
  writing: "The answer was written, token by token.",
  queued: "The request waited until the engine had a turn for it.",
  agreed: "The helpers were asked, and their streams were opened.",
  "prefix sent": "What helpers need of the prompt's beginning left this machine.",
  waited: "The machine had nothing to do but wait for the others.",
  computed: "The machine computed its part of the prompt, or of the texts.",
  "left to chats": "No machine was given a part, as each of them answered a chat.",
  prefilled: "The machine computed the prompt, or what was kept of it, alone.",
  "exposed hand-off": "All was computed, and the last results were still on their way.",
  "spot check": "Some of the helpers' results were computed again, to compare them.",
  "check of later tokens": "Some of the helpers' later results were computed again, to compare them.",
  "loaded after scoring": "The model that answers was loaded once the one that scored had made room.",
  "restored from disk": "Kept work on the prompt's beginning was read from the disk.",
  fetched: "Another machine sent its kept work on the prompt's beginning.",
  scored: "Smart prefill: a small model scored which parts of the prompt matter.",
  decoded: "The engine wrote the answer.",
  drafted: "Another model drafted tokens, which the answering model verified.",
  loaded: "A model was loaded for this step.",
  "network and rest": "The request travelled to the machine that answered.",
  starting: "The engine's process was started.",
  verifying: "The model's files were compared with their checksums.",
  "reading the files": "The weights were read from the disk.",
  "reading the tokenizer": "The tokenizer was read.",
  "warming up": "The model computed for the first time, which compiles its kernels.",
  measuring: "The machine's speed with this model was measured. Later loads keep the result.",
  "probing for exactness": "It was tested whether drafts keep every byte of an answer. Later loads keep the result.",
};

/** Bytes that crossed links, by the machines that received them: the sender counts them as well. */
export function travelled(trace) {
  return trace.steps.reduce((sum, step) => sum + (RECEIVING.has(step.name) ? step.n_bytes ?? 0 : 0), 0);
}

/** +12 %; nothing for a miss of 5 % or less, or of 100 ms or less. */
export function miss(actual, planned) {
  if (actual === null || planned === null || planned === undefined) return "";
  return Math.abs(actual - planned) > Math.max(0.1, 0.05 * planned) ? deviation(actual, planned) : "";
}

const length = (step) => (step.end_s ?? 0) - (step.begin_s ?? 0);
const isPhase = (step) => step.parent === 0 && PHASES.includes(step.name);

/** The four phases; one that came several times has several bars. */
function phaseRows(trace) {
  return PHASES.flatMap((name) => {
    const found = trace.steps.filter((step) => isPhase(step) && step.name === name);
    if (!found.length) return [];
    const planned = found.find((step) => step.planned_s !== undefined && step.planned_s !== null)?.planned_s ?? null;
    return [{ name, machine: found[0].machine, bars: found, seconds: found.reduce((sum, step) => sum + step.seconds, 0), planned_s: planned, n_bytes: 0 }];
  });
}

export function waterfall(trace) {
  const end = trace.took_s;
  if (!trace.steps.length || !end) return h("p", { class: "quiet" }, "No step was measured.");
  const details = trace.steps.filter((step) => step.parent !== undefined && step.parent !== null && !isPhase(step));
  const all = unfolded.has(trace.id);
  const shown = details.filter((step) => all || step.seconds >= LEAST * end);
  const machines = [...new Set(trace.steps.map((step) => step.machine))];
  const lane = (machine) => machines.indexOf(machine) % 5;
  const draw = (step) => row({ bars: [step], ...step }, lane, end, trace.ttft_s);
  const folded = details.length - details.filter((step) => step.seconds >= LEAST * end).length;
  return [
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Steps in time" },
      h("table", { class: "waterfall" },
        h("thead", null, h("tr", null,
          h("th", { scope: "col" }, "Step"),
          h("th", { scope: "col", class: "track" }, h("span", { class: "ends" }, h("span", null, "0 s"), h("span", null, seconds(end)))),
          h("th", { scope: "col", class: "number" }, "Planned"), h("th", { scope: "col", class: "number" }, "Actual"),
          h("th", { scope: "col", class: "number" }, "Miss"), h("th", { scope: "col", class: "number" }, "Sent"))),
        h("tbody", { key: "phases", class: "phases" }, phaseRows(trace).map((one) => row(one, lane, end, trace.ttft_s))),
        machines.map((machine) => {
          const steps = shown.filter((step) => step.machine === machine);
          return steps.length > 0 && h("tbody", { key: `on ${machine}` },
            h("tr", { class: "machine" }, h("th", { scope: "rowgroup", colspan: "6" }, h("i", { class: `swatch lane${lane(machine)}`, "aria-hidden": "true" }), machine)),
            steps.map(draw));
        }))),
    h("p", { class: "explain quiet", role: "status" }, explained),
    folded > 0 && h("p", null, h("button", { class: "plain small", "aria-expanded": String(all), onclick: () => { if (!unfolded.delete(trace.id)) unfolded.add(trace.id); redraw(); } },
      all ? "Hide steps of less than 1 %" : `Show ${count(folded)} more of less than 1 %`)),
  ];
}

function explain(event) {
  const line = event.currentTarget.closest("section").querySelector(".explain");
  explained = `${event.currentTarget.textContent}: ${event.currentTarget.title}`;
  line.textContent = explained;
}

function row(step, lane, end, ttft_s) {
  const x = (time_s) => (SCALE * time_s) / end;
  const words = WORDS[step.name] ?? "A step that a machine reported under this name.";
  const late = step.planned_s !== null && step.planned_s !== undefined && step.seconds > 1.5 * step.planned_s && step.seconds - step.planned_s > 0.1;
  const busy = (bar) => (length(bar) > 0 ? Math.max(0.25, Math.min(1, bar.seconds / length(bar))) : 1);
  return h("tr", null,
    h("th", { scope: "row" }, h("span", { class: "step", tabindex: "0", title: words, onfocus: explain, onmouseenter: explain }, step.name)),
    h("td", { class: "track" },
      h("svg", { viewBox: `0 0 ${SCALE} 14`, preserveAspectRatio: "none", "aria-hidden": "true" },
        step.bars.map((bar, at) => h("rect", { key: at, class: `came lane${lane(bar.machine)}`, opacity: busy(bar).toFixed(2),
          x: Math.min(SCALE - 2, x(bar.begin_s ?? 0)).toFixed(1), y: 3, width: Math.max(2, x(length(bar))).toFixed(1), height: 8 })),
        ttft_s && h("line", { class: "first", x1: x(ttft_s).toFixed(1), x2: x(ttft_s).toFixed(1), y1: 0, y2: 14 }))),
    h("td", { class: "number" }, seconds(step.planned_s)),
    h("td", { class: "number" }, seconds(step.seconds)),
    h("td", { class: late ? "number late" : "number quiet" }, miss(step.seconds, step.planned_s)),
    h("td", { class: "number" }, step.n_bytes ? bytes(step.n_bytes) : none));
}
