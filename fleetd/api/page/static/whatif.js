// What one more machine would give, over the length of a prompt: the planner's own prices. All of it is modelled.

import { get, post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { bar, short } from "/page/fleet.js";
import { redraw } from "/page/store.js";
import { count, seconds } from "/page/units.js";

const LINKS = { wired: "gigabit Ethernet", wifi: "Wi-Fi", thunderbolt: "Thunderbolt" };
const FIRST = "Mac mini M4, 16 GB";
const asked = { model: "", machine: FIRST, link: "wired" };
/** The names of machines that are known. */
let known = [FIRST];
let answer = null;
let trouble = null;
let open = false;
/** The place of the slider among the lengths. */
let at = 2;
let questions = 0;

async function ask(changes) {
  Object.assign(asked, changes);
  const mine = ++questions;
  redraw();
  try {
    if (known.length === 1) known = (await get("/fleet/v1/plan/machines")).machines;
    const found = await post("/fleet/v1/plan/added", asked);
    if (mine !== questions) return;
    answer = found;
    trouble = null;
  } catch (error) {
    if (mine !== questions) return;
    answer = null;
    trouble = error;
  }
  redraw();
}

/** The section, folded until somebody wants it. `installed`: the models that it can be asked for. */
export function whatIf(installed) {
  if (!installed.length) return null;
  if (!installed.some((model) => model.name === asked.model)) asked.model = (installed.find((model) => model.loaded) ?? installed[0]).name;
  return h("section", { key: "whatif", class: "whatif", "aria-labelledby": "whatif" }, h("h2", { id: "whatif" }, "What would another machine give?"),
    open
      ? [controls(installed), trouble && h("p", { class: "trouble", role: "alert" }, trouble.message, " ", h("span", { class: "quiet" }, trouble.hint)), answer?.points.length > 0 && comparison()]
      : h("p", null, h("button", { onclick: () => { open = true; ask({}); } }, "Compare before you buy"), " ",
        h("span", { class: "quiet" }, "How soon an answer would begin: on this machine alone, and with one more.")));
}

function controls(installed) {
  const choice = (name, label, options) => h("label", null, label, " ", h("select", { id: `whatif-${name}`, value: asked[name], onchange: (event) => ask({ [name]: event.target.value }) },
    options.map(([value, text]) => h("option", { key: value, value }, text))));
  return h("div", { class: "controls" },
    choice("machine", "Add", known.map((name) => [name, name])),
    choice("link", "over", Object.entries(LINKS)),
    choice("model", "and ask", installed.map((model) => [model.name, short(model.name)])));
}

function comparison() {
  const { points } = answer;
  const point = points[Math.min(at, points.length - 1)];
  const rows = [["This machine alone", point.alone_s]];
  if (points.some((one) => one.fleet_s < one.alone_s)) rows.push(["The fleet as it is", point.fleet_s]);
  rows.push([`With ${answer.machine}`, point.added_s]);
  const most = Math.max(...rows.map(([, time]) => time));
  return [
    h("label", { class: "slider" }, "A prompt of ", h("b", null, count(point.tokens)), " tokens",
      h("input", { id: "whatif-tokens", type: "range", min: "0", max: String(points.length - 1), step: "1", value: String(Math.min(at, points.length - 1)),
        "aria-valuetext": `${count(point.tokens)} tokens`, oninput: (event) => { at = Number(event.target.value); redraw(); } })),
    h("dl", { class: "compared" }, rows.map(([name, time]) => h("div", { key: name }, h("dt", null, name), h("dd", null, bar(time, most, `${name}: ${seconds(time)}`), h("b", null, seconds(time)))))),
    h("p", null, gain(point)),
    h("p", { class: "quiet" }, `Modelled, not measured: by the published figures of ${answer.machine}, ${answer.modelled_here ? "and of this machine" : "this machine's measured speed"}, the model loaded everywhere, no other request.`,
      answer.doubt && ` This machine's speed is in doubt: ${answer.doubt}.`, ` ${space()}`),
  ];
}

function gain(point) {
  const times = point.fleet_s / point.added_s;
  if (times < 1.05) return "It would not begin sooner.";
  const others = point.nodes.filter((node) => node === answer.machine);
  const how = point.kind === "remote" || point.kind === "whole" ? "that machine reads all of it" : others.length ? "the machines read it together" : "";
  return `The answer would begin ${times < 10 ? times.toFixed(1) : count(times)} times as soon${how && `: ${how}`}.`;
}

function space() {
  if (answer.layers_held >= answer.layers) return "";
  return answer.layers_held
    ? `It has room for ${answer.layers_held} of the model's ${answer.layers} layers: it can help, and cannot answer alone.`
    : "It has no room for this model.";
}
