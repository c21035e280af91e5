// The machines and the links between them.

import { post } from "/page/calls.js";
import { keptOnDisk } from "/page/kept.js";
import { h } from "/page/dom.js";
import { gainLine } from "/page/gain.js";
import { pace, paces } from "/page/pace.js";
import { picture } from "/page/picture.js";
import { hereName, redraw, state } from "/page/store.js";
import { bytes, count, counted, memory, percent, seconds, speed, stateWord } from "/page/units.js";

// The first drawing is the slow one. Of a large fleet it shows some machines, and more with each further frame.
const STEP = 8;
let shown = 0;

/** All machines in one form, this one first. */
export function machines() {
  const { status, fleet } = state;
  const machine = status.machine;
  const card = machine.card_bytes > 0;
  const here = {
    id: fleet.node_id || "this",
    name: hereName() || "this machine",
    here: true,
    state: status.draining ? "draining" : "usable",
    reason: "", hint: "",
    tier: machine.tier,
    chip: machine.product || machine.gpu || machine.cpu,
    accelerator: machine.accelerator,
    total: card ? machine.card_bytes : machine.memory_bytes,
    free: machine.free_unknown ? null : card ? machine.card_free_bytes : machine.available_bytes,
    limit: limitOf(card ? machine.card_bytes : machine.memory_bytes, status.memory.available_bytes, status.memory.usable_bytes),
    running: status.requests.running,
    waiting: status.requests.waiting,
    vectors: status.engines.filter((engine) => engine.shape && engine.shape.purpose !== "chat").reduce((sum, engine) => sum + engine.prefilling + engine.waiting, 0),
    pulls: status.pulls,
    models: status.engines.map((engine) => ({
      name: engine.part_of || engine.model,
      state: engine.state === "ready" ? "loaded" : engine.state,
      speed: engine.speed,
      part_first: engine.part_of ? engine.first_layer : 0,
      part_last: engine.part_of ? engine.last_layer : 0,
      part_total: engine.shape?.layers ?? 0,
      part_asked_by: engine.asked_by.join(", "),
      members: engine.members,
      rank: engine.rank,
      ranks: engine.ranks,
      cut_anew: engine.cut_anew,
      note: engine.error || (engine.state === "loading" && [engine.stage, engine.again].filter(Boolean).join("; ")) || "",
      // Weights that a CPU holds packed are not in what its worker reports.
      bytes: Math.max(engine.memory_bytes, (engine.shape?.weights_bytes ?? 0) + engine.prefix_bytes + engine.kv_bytes),
      kept: engine.prefix_bytes,
      running: engine.kv_bytes,
      helping: engine.assisting,
    })),
    link: null,
  };
  const peers = [...state.peers.values()].map((peer) => ({
    ...peer,
    id: peer.node_id,
    total: peer.memory_bytes,
    free: peer.available_bytes,
    limit: limitOf(peer.memory_bytes, peer.available_bytes, peer.usable_bytes),
    models: [...peer.models.map((model) => ({
      ...model,
      // What it has of a model for others is loaded, though the model is not.
      state: model.part_last > 0 && model.state === "installed" ? "loaded" : model.state,
      bytes: model.state === "loaded" && !model.part_last ? (model.shape?.weights_bytes ?? 0) : 0,
    })), ...heldForHere(peer)],
    link: peer.state === "usable" ? { rtt_ms: peer.rtt_ms, bytes_per_s: peer.bytes_per_s, doubtful: peer.link_doubtful,
      kind: peer.paths.find((path) => path.in_use)?.kind ?? "" } : null,
  }));
  peers.sort((one, other) => one.name.localeCompare(other.name) || one.id.localeCompare(other.id));
  return [here, ...peers];
}

/** What a machine holds of models that this one asked for, as far as it does not tell that itself: it names no part of a model whose files it has not got, and no rank. */
function heldForHere(peer) {
  const told = (name) => peer.models.some((model) => model.name === name && model.part_last > 0);
  return state.status.engines.flatMap((engine) => engine.members.map((held, at) => ({ engine, held, rank: at + 1 })))
    .filter(({ engine, held }) => held.name === peer.name && !told(engine.model))
    .map(({ engine, held, rank }) => ({
      name: engine.model, state: engine.state === "ready" || held.stage === "loaded" ? "loaded" : "loading", bytes: 0,
      part_first: engine.ranks ? 0 : held.first, part_last: engine.ranks ? 0 : held.last, part_total: engine.shape?.layers ?? 0,
      rank, ranks: engine.ranks, part_asked_by: hereName() || "this machine",
    }));
}

/** How full models may make the memory now, in bytes; 0 if that is not known. */
function limitOf(total, free, usable) {
  return usable > 0 ? total - free + usable : 0;
}

export function fleetView() {
  const all = machines();
  if (shown < all.length) {
    shown += STEP;
    if (shown < all.length) redraw();
  }
  return [
    gainLine(),
    h("p", { class: "quiet" }, summary(all)),
    all.length > 2 && picture(all, shown),
    h("section", { "aria-labelledby": "machines" },
      h("h2", { id: "machines" }, "Machines"),
      h("ul", { class: "rows machines" }, all.slice(0, shown).map(machineRow))),
    all.length === 1 && !state.fleet.neighbours.length && h("p", { class: "quiet" },
      state.fleet.enabled
        ? ["This machine is alone. ", h("a", { href: "#pairing" }, "Pair another one"), ", and long prompts are read together."]
        : "The fleet is turned off by the setting fleet.enabled."),
    troubles(),
  ];
}

/** "3 machines, 47.1 GB; 1 request running, 2 waiting" */
function summary(all) {
  const usable = all.filter((machine) => machine.state === "usable");
  const total = usable.reduce((sum, machine) => sum + machine.total, 0);
  const { running, waiting } = state.status.requests;
  const whole = usable.length === all.length ? counted(all.length, "machine") : `${usable.length} of ${counted(all.length, "machine")} usable`;
  return `${whole}, ${memory(total)} of memory; ${running ? `${counted(running, "request")} running` : "nothing runs"}${waiting ? `, ${count(waiting)} waiting` : ""}`;
}

function machineRow(machine) {
  const out = machine.state !== "usable";
  return h("li", { key: machine.id, class: out ? "out" : null },
    h("div", { class: "who" },
      h("h3", null, machine.name, machine.here && h("small", null, " this machine")),
      h("p", { class: "quiet" }, [machine.chip, machine.accelerator].filter(Boolean).join(" · ") || "hardware not known"),
      h("p", { class: `state ${machine.state}` }, stateWord(machine.state),
        machine.heard_s > 5 && out && ` · last heard ${seconds(machine.heard_s)} ago`)),
    h("div", { class: "memory" }, out && !machine.here ? lostMemory(machine) : memoryBar(machine)),
    h("div", { class: "load" }, (!out || machine.here) && work(machine), machine.link && h("p", { class: "quiet" }, linkText(machine.link))),
    h("div", { class: "held" },
      out && machine.reason && h("p", { class: "why" }, machine.reason, machine.hint && [" ", h("span", { class: "quiet" }, machine.hint)]),
      (!out || machine.here) && modelList(machine)));
}

// ---- Memory ----------------------------------------------------------------------------------------------

function lostMemory(machine) {
  return h("p", { class: "quiet" }, machine.total ? `${memory(machine.total)} of memory. What is in it and what it does is not known now.` : "Its memory, its models and what it does are not known now.");
}

/** What the memory holds, largest first within models: [{name, size, kind}]. Sizes add up to the total. */
export function memoryParts(machine) {
  const held = (machine.models ?? []).filter((model) => model.bytes > 0).sort((one, other) => other.bytes - one.bytes);
  const sum = (field) => held.reduce((all, model) => all + (model[field] ?? 0), 0);
  const kept = sum("kept");
  const running = sum("running");
  const used = Math.max(0, machine.total - machine.free);
  const own = sum("bytes");
  const parts = held.map((model, at) => ({ name: short(model.name), size: Math.max(0, model.bytes - (model.kept ?? 0) - (model.running ?? 0)), kind: `lane${at % 5}` }));
  parts.push({ name: "kept prompts", size: kept, kind: "kept" }, { name: "running prompts", size: running, kind: "at-work" },
    { name: held.length || machine.here ? "other programs" : "in use", size: Math.max(0, used - own), kind: "other" }, { name: "free", size: machine.free, kind: "free" });
  return parts.filter((part) => part.size > 0);
}

function memoryBar(machine) {
  if (!machine.total) return h("p", { class: "quiet" }, "memory not known");
  if (machine.free === null) return h("p", null, memory(machine.total), h("span", { class: "quiet" }, ", what is free is not known"));
  const parts = memoryParts(machine);
  const limit = machine.limit > 0 && machine.limit < machine.total ? machine.limit : 0;
  const told = parts.map((part) => `${part.name} ${memory(part.size)}`).join(", ");
  const scale = 1000 / Math.max(machine.total, parts.reduce((sum, part) => sum + part.size, 0));
  let at = 0;
  return [
    h("svg", { class: "strip", viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": `${memory(machine.total)} of memory: ${told}${limit ? `; models may fill it up to ${memory(limit)}` : ""}` },
      parts.map((part) => {
        const x = at;
        at += part.size * scale;
        return h("rect", { key: part.name, class: part.kind, x: x.toFixed(1), width: Math.max(1, part.size * scale).toFixed(1), y: 2, height: 12 }, h("title", null, `${part.name}: ${memory(part.size)}`));
      }),
      limit > 0 && h("line", { class: "limit", x1: (limit * scale).toFixed(1), x2: (limit * scale).toFixed(1), y1: 0, y2: 16 }, h("title", null, `models may fill the memory up to ${memory(limit)}`))),
    h("ul", { class: "legend" }, parts.map((part) => h("li", { key: part.name }, h("span", { class: `swatch ${part.kind}` }), `${part.name} `, h("b", null, memory(part.size)))),
      limit > 0 && h("li", { key: "limit", title: "Models may fill the memory up to here" }, h("span", { class: "swatch limit" }), "limit ", h("b", null, memory(limit))),
      machine.here && keptOnDisk()),
  ];
}

// ---- Work ------------------------------------------------------------------------------------------------

function work(machine) {
  const now = pace(machine.here ? "" : machine.name);
  const does = [
    (machine.running > 0 || machine.waiting > 0) && counted(machine.running, "request"),
    machine.waiting > 0 && `${count(machine.waiting)} waiting`,
    machine.vectors > 0 && "computes vectors",
  ].filter(Boolean);
  return [
    h("p", null, does.length ? does.join(", ") : h("span", { class: "quiet" }, "idle")),
    now > 0 && h("p", { class: "pace" }, h("b", null, speed(now)), " ", machine.here && curve(paces), !machine.here && h("small", null, "for this machine")),
  ];
}

function curve(values) {
  const top = Math.max(...values);
  if (values.length < 3 || !top) return null;
  const points = values.map((value, at) => `${((60 * at) / (values.length - 1)).toFixed(1)},${(15 - (14 * value) / top).toFixed(1)}`).join(" ");
  return h("svg", { class: "curve", viewBox: "0 0 60 16", "aria-hidden": "true" }, h("polyline", { points }));
}

function modelList(machine) {
  const order = { loaded: 0, loading: 1, failed: 2 };
  const models = [...(machine.models ?? [])].sort((one, other) => (order[one.state] ?? 3) - (order[other.state] ?? 3));
  const active = models.filter((model) => model.state in order);
  const idle = models.length - active.length;
  return h("ul", { class: "chips" }, active.map(chip),
    !active.length && h("li", { key: "none", class: "quiet" }, "no model loaded"),
    (machine.pulls ?? []).map((pull) => h("li", { key: `pull ${pull.model}`, class: "chip" },
      h("span", { class: "name" }, short(pull.model)), h("span", { class: "tag loading" }, ` ${coming(pull)}`))),
    idle > 0 && h("li", { key: "more", class: "quiet", title: models.filter((model) => !active.includes(model)).map((model) => short(model.name)).join(", ") }, `${counted(idle, "more")} on its disk`.replace("mores", "more")),
    machine.here && !active.some((model) => model.name === state.status.default_model) && loadDefault());
}

/** Which machine holds which layers: "0–14 here, 15–29 on kitchen"; while they load also how far it is. */
function spans({ members }) {
  const held = members.map((held) => `${held.first}–${held.last - 1} on ${held.name}${held.relayed ? " (through here)" : ""}${far(held)}`);
  return [`0–${members[0].first - 1} here`, ...held].join(", ");
}

function far({ stage, done_bytes, total_bytes }) {
  return stage ? ` (${stage}${["copying", "downloading", "downloading here", "reading"].includes(stage) ? `, ${bytes(done_bytes)} of ${bytes(total_bytes)}` : ""})` : "";
}

/** "downloading model.safetensors, 1.2 GB of 2.3 GB" */
function coming({ stage, done_bytes, total_bytes }) {
  return `${stage || "being fetched"}${total_bytes ? `, ${bytes(done_bytes)} of ${bytes(total_bytes)}` : ""}`;
}

/** What a machine has of a model over several: "layers 0–14 here, 15–29 on kitchen", "part 2 of 2 of every layer, for mini"; "" of others. */
export function heldTogether(model) {
  const asked = model.part_asked_by ? `, for ${model.part_asked_by}` : "";
  if (model.members?.length && model.ranks) return `a part of every layer here and on ${model.members.map((held) => `${held.name}${far(held)}`).join(", ")}`;
  if (model.members?.length) return `layers ${spans(model)}`;
  if (model.ranks) return `part ${model.rank + 1} of ${model.ranks} of every layer${asked}`;
  return model.part_last > 0 ? `layers ${model.part_first}–${model.part_last - 1}${model.part_total ? ` of ${model.part_total}` : ""}${asked}` : "";
}

function chip(model, at) {
  const part = heldTogether(model);
  return h("li", { key: `${model.name} ${model.part_first} ${at}`, class: "chip" },
    h("span", { class: "name" }, short(model.name)), part && h("span", { class: "tag" }, ` ${part}`),
    model.cut_anew && h("span", { class: "tag", title: model.cut_anew }, " cut anew"),
    model.state !== "loaded" && h("span", { class: `tag ${model.state}` }, ` ${model.state}`),
    model.speed?.prefill_tok_s > 0 && h("span", { class: "quiet" },
      ` reads ${speed(model.speed.prefill_tok_s)}${model.speed.decode_tok_s > 0 ? `, writes ${speed(model.speed.decode_tok_s)}` : ""}`, model.speed.doubt && [" ", h("abbr", { title: model.speed.doubt }, "(in doubt)")], model.capped && " (not believed)"),
    model.helping > 0 && h("span", { class: "quiet" }, " helping another machine"),
    model.note && h("span", { class: "why" }, ` ${model.note}`));
}

// ---- Loading the default model ---------------------------------------------------------------------------

const loading = { busy: false, error: null };

function loadDefault() {
  const name = state.status.default_model;
  return h("li", { key: "load" }, h("button", { class: "small plain", disabled: loading.busy, onclick: () => loadModel(name) }, loading.busy ? `Loading ${short(name)} …` : `Load ${short(name)}`),
    loading.error && h("span", { class: "trouble", role: "alert" }, ` ${loading.error.message} ${loading.error.hint}`));
}

async function loadModel(model) {
  Object.assign(loading, { busy: true, error: null });
  redraw();
  try {
    await post("/fleet/v1/models/load", { model });
  } catch (error) {
    loading.error = error;
  }
  loading.busy = false;
  redraw();
}

export function linkText(link) {
  const parts = [link.kind, link.bytes_per_s ? `${bytes(link.bytes_per_s)}/s${link.doubtful ? " (in doubt)" : ""}` : "speed not measured",
    link.rtt_ms !== null && link.rtt_ms !== undefined && `${link.rtt_ms < 10 ? link.rtt_ms.toFixed(1) : count(link.rtt_ms)} ms`];
  // A line breaks between the facts.
  return parts.filter(Boolean).map((part) => part.replaceAll(" ", "\u00a0")).join(" · ");
}

export function bar(part, of, label) {
  const width = Math.max(0, Math.min(100, (100 * part) / of));
  return h("svg", { class: "bar", viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${percent(part, of)}` },
    h("rect", { width: 100, height: 4, class: "track" }), h("rect", { width: width.toFixed(1), height: 4, class: "fill" }));
}

/** Qwen3-8B-4bit for mlx-community/Qwen3-8B-4bit */
export function short(name) {
  return name.slice(name.lastIndexOf("/") + 1);
}

function troubles() {
  const { fleet } = state;
  const found = [
    ...fleet.unanswered.map((one) => `${one.address}: ${one.reason} ${one.hint}`),
    ...[...state.peers.values()].filter((peer) => peer.new).map((peer) => `${peer.name} (${peer.short_id}) is new, on the word of ${peer.through}: it sees no prompts typed here until you allow it under Pairing.`),
    ...(fleet.late?.length ? [`A member adds more machines than one may in a day; ${fleet.late.length} wait.`] : []),
    ...(fleet.removed_by ? [`${fleet.removed_by} removed this machine from the fleet.`] : []),
    ...(fleet.enabled && !["running", "starting", "off"].includes(fleet.mdns) ? [`Discovery does not run: ${fleet.mdns}`] : []),
  ];
  if (!found.length && !fleet.neighbours.length) return null;
  return h("section", { "aria-labelledby": "nearby" },
    h("h2", { id: "nearby" }, "Nearby"),
    h("ul", { class: "plainlist" },
      found.map((text) => h("li", { key: text, class: "why" }, text)),
      fleet.neighbours.map((one) => h("li", { key: one.node_id }, `${one.name} is not paired with this machine. `,
        h("a", { href: "#pairing" }, one.pairing ? "It shows a code now: join it" : "Pair it")))));
}
