// Pairing: show a code here, or type the one that another machine shows; then compare the phrase.

import { call, events, post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { redraw, say, state } from "/page/store.js";
import { counted, seconds, stateWord } from "/page/units.js";

/** What goes on: mode "" (nothing), "pair" or "join"; `event` is the last that came. */
const pairing = { mode: "", code: null, met: null, answered: false, done: null, note: "", error: null, abort: null, ends: 0, sees: true };
/** The machine whose removal has been asked for once, and what went wrong with one. */
let unpairing = "";
let trouble = null;
/** Node ids of the machines that stay when the one on whose word they are here goes. */
const keep = new Set();
// Of a code, as `fleetctl` shows it too.
const EXAMPLE = "42-lusab-babad";

function reset(mode = "") {
  pairing.abort?.abort();
  Object.assign(pairing, { mode, code: null, met: null, answered: false, done: null, note: "", error: null, abort: mode ? new AbortController() : null });
}

async function run(mode, path, body) {
  reset(mode);
  const { abort } = pairing;
  redraw();
  try {
    for await (const event of events(await call("POST", path, body, { signal: abort.signal }))) {
      if (pairing.abort !== abort) return;
      heard(event);
      redraw();
      if (event.type === "paired") break;
    }
    if (!pairing.done) throw new Error("The pairing ended before it was complete.");
  } catch (error) {
    if (error.name === "AbortError" || pairing.abort !== abort) return;
    pairing.error = error;
    say(error.message);
  }
  pairing.mode = "";
  redraw();
}

function heard(event) {
  if (event.type === "code") {
    pairing.code = event;
    pairing.ends = performance.now() + event.expires_s * 1000;
    tick();
  } else if (event.type === "meeting") {
    pairing.met = event;
    say(`${event.name} has the code. Compare the phrase.`);
  } else if (event.type === "paired") {
    pairing.done = event;
    say(`${event.name} is paired.`);
  } else if (event.type === "wrong_code") pairing.note = `Another machine tried a wrong code; ${counted(event.tries_left, "try").replace("trys", "tries")} left.`;
  else if (event.type === "crowded") pairing.note = `Many connections come from ${event.addresses.join(", ")} and do not try the code.`;
  else if (event.type === "searching") pairing.note = "Looking for the machine that shows this code …";
}

function tick() {
  if (pairing.mode !== "pair" || pairing.met) return;
  redraw();
  setTimeout(tick, 1000);
}

async function answer(admit) {
  pairing.answered = true;
  redraw();
  try {
    await post("/fleet/v1/pair/answer", { node_id: pairing.met.node_id, admit, sees_prompts: admit && pairing.sees });
    if (!admit) {
      reset();
      pairing.error = { message: "The machine was not let in.", hint: "Different phrases mean that another machine is in between: find it before you pair again." };
    }
  } catch (error) {
    pairing.error = error;
    pairing.answered = false;
  }
  redraw();
}

export function pairingView() {
  if (!state.fleet.enabled) return h("p", null, "The fleet is turned off by the setting fleet.enabled.");
  return [
    pairing.error && h("p", { class: "trouble", role: "alert" }, pairing.error.message, " ", h("span", { class: "quiet" }, pairing.error.hint)),
    pairing.done && h("p", { class: "good", role: "status" }, `${pairing.done.name} is paired. The fleet: ${pairing.done.members.join(", ")}.`),
    h("div", { class: "halves" }, pairing.mode === "join" ? null : letIn(), pairing.mode === "pair" ? null : join()),
    members(),
  ];
}

function letIn() {
  const { mode, code, met } = pairing;
  return h("section", { key: "let-in", "aria-labelledby": "let-in" }, h("h2", { id: "let-in" }, "Let another machine in"),
    mode !== "pair" ? [
      h("p", null, "This machine shows a code. Type it on the other one, on its page or with ", h("code", null, "fleetctl join"), "."),
      h("button", { key: "begin", onclick: () => run("pair", "/fleet/v1/pair", {}) }, "Show a code")]
    : [
      code && !met && [
        h("p", { class: "code", "aria-label": `The code: ${code.code}` }, code.code),
        h("p", null, `It works once, for ${seconds(Math.max(0, Math.round((pairing.ends - performance.now()) / 1000)))} more.`),
        h("p", { class: "quiet" }, "On the other machine: ", h("code", { class: "together" }, `fleetctl join ${code.code}`)),
        code.addresses.length > 0 && h("p", { class: "quiet" }, "If it does not find this one by itself, it needs an address: ", h("code", null, `${code.addresses[0]}:${code.port}`))],
      pairing.note && h("p", { class: "why" }, pairing.note),
      met && phrase(true),
      h("button", { key: "close", onclick: () => { reset(); redraw(); } }, "Stop pairing")]);
}

// The code decides who is let in, so the machine that shows it is the one that is asked.
function phrase(asks) {
  const { met, answered } = pairing;
  return [
    h("p", null, `${met.name} has the code. This phrase has to be on both screens:`),
    h("p", { class: "code phrase" }, met.phrase),
    asks && !answered && [
      h("p", null, h("label", null, h("input", { type: "checkbox", checked: pairing.sees, onchange: (event) => { pairing.sees = event.target.checked; } }), ` ${met.name} may see prompts of this fleet. Only then can it help with them.`)),
      h("p", { class: "buttons" }, h("button", { key: "same", onclick: () => answer(true) }, "It is the same: let it in"), h("button", { key: "other", class: "danger", onclick: () => answer(false) }, "It is another"))],
    (!asks || answered) && h("p", { class: "quiet" }, "Waiting for the other machine …")];
}

function join() {
  const { mode, met } = pairing;
  return h("section", { key: "join", "aria-labelledby": "join" }, h("h2", { id: "join" }, "Join another machine"),
    mode !== "join" ? [
      h("p", null, "Type the code that the other machine shows."),
      h("form", { class: "stacked", onsubmit: begin },
        h("label", { for: "code" }, "Code"), h("input", { id: "code", name: "code", required: true, autocomplete: "off", spellcheck: "false", placeholder: EXAMPLE }),
        h("label", { for: "host" }, "Its address, if it is not found by itself"), h("input", { id: "host", name: "host", autocomplete: "off", spellcheck: "false", placeholder: "192.168.1.20" }),
        h("label", { class: "check" }, h("input", { type: "checkbox", name: "sees", checked: pairing.sees, onchange: (event) => { pairing.sees = event.target.checked; } }), " The other machine may see prompts typed here"),
        h("button", null, "Join")),
      nearby()]
    : [
      pairing.note && !met && h("p", { class: "quiet" }, pairing.note),
      met && phrase(false),
      h("button", { key: "stop", class: "plain", onclick: () => { reset(); redraw(); } }, "Stop")]);
}

/** The machines of this network that are not in the fleet, and what to do on each. */
function nearby() {
  const { neighbours } = state.fleet;
  if (!neighbours.length) return h("p", { key: "nearby", class: "quiet nearby" }, "fleetd sees no machine on this network that could be paired.");
  return h("div", { key: "nearby", class: "nearby" }, h("h3", { id: "nearby" }, "Nearby"),
    h("ul", { class: "plainlist", "aria-labelledby": "nearby" }, neighbours.map((one) => h("li", { key: one.node_id }, h("b", null, one.name), " ",
      one.pairing ? h("span", { class: "good" }, "shows a code now: type it above") : h("span", { class: "quiet" }, "shows a code with ", h("code", null, "fleetctl pair"), ", or on its page")))));
}

function begin(event) {
  event.preventDefault();
  const { code, host, sees } = event.target.elements;
  run("join", "/fleet/v1/join", { code: code.value.trim(), sees_prompts: sees.checked, ...(host.value.trim() ? { host: host.value.trim() } : {}) });
}

async function change(path, body) {
  trouble = null;
  try {
    const said = await post(path, body);
    if (said.pending?.length) trouble = { message: `${said.pending.join(", ")} cannot be told now, and will be when it is back.`, hint: "" };
  } catch (error) {
    trouble = error;
  }
  unpairing = "";
  keep.clear();
  redraw();
}

/** What goes with a machine, and may be kept. */
function brings(peer, names) {
  if (!peer.brings.length) return null;
  return h("div", { key: "brings" }, h("p", { class: "why" }, `These are here on the word of ${peer.name} alone, and go with it:`),
    peer.brings.map((id) => h("p", { key: id }, h("label", null,
      h("input", { type: "checkbox", checked: keep.has(id), onchange: (event) => { if (event.target.checked) keep.add(id); else keep.delete(id); } }),
      ` keep ${names.get(id) ?? ""} `, h("small", null, id.slice(0, 7))))));
}

function members() {
  const names = new Map([[state.fleet.node_id, "this machine"], ...[...state.peers.values()].map((peer) => [peer.node_id, peer.name])]);
  const peers = [...state.peers.values()].sort((one, other) => one.name.localeCompare(other.name));
  return h("section", { "aria-labelledby": "members" }, h("h2", { id: "members" }, "Machines of the fleet"),
    trouble && h("p", { class: "trouble", role: "alert" }, trouble.message, " ", h("span", { class: "quiet" }, trouble.hint)),
    peers.length ? h("ul", { class: "rows" }, peers.map((peer) => h("li", { key: peer.node_id },
      h("div", null, h("h3", null, peer.name, h("small", null, ` ${peer.short_id}`)), h("p", { class: "quiet" }, stateWord(peer.state), peer.added_by && `, added by ${names.get(peer.added_by) ?? peer.added_by.slice(0, 7)}`)),
      h("div", null, h("label", null, h("input", { type: "checkbox", checked: peer.allowed_here, onchange: (event) => change("/fleet/v1/peers/prompts", { peer: peer.node_id, allowed: event.target.checked, fleet: false }) }),
        " sees prompts typed here"), peer.new && h("p", { class: "why" }, `New: it is here on the word of ${peer.through}. Is it yours? Until you allow it, it sees no prompts typed here.`), peer.allowed_here && !peer.allowed_by_fleet && h("p", { class: "why" }, "The fleet does not let it see prompts.")),
      h("p", { class: "buttons" }, unpairing === peer.node_id
        ? [brings(peer, names), h("button", { key: "sure", class: "danger", onclick: () => change("/fleet/v1/unpair", { peer: peer.node_id, ...(keep.size ? { keep: [...keep] } : {}) }) }, `Remove ${peer.name} from the fleet`), h("button", { key: "keep", class: "plain", onclick: () => { unpairing = ""; keep.clear(); redraw(); } }, "Keep it")]
        : h("button", { key: "unpair", class: "plain", onclick: () => { unpairing = peer.node_id; keep.clear(); redraw(); } }, "Unpair …"))))) : h("p", { class: "quiet" }, "No other machine yet."));
}
