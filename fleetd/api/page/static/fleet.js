// The machines and the links between them.

import { h } from "/page/dom.js";
import { picture } from "/page/picture.js";
import { redraw, state } from "/page/store.js";
import { bytes, count, counted, memory, none, percent, seconds, speed } from "/page/units.js";

const WORDS = {
  usable: "usable", connecting: "connecting", quiet: "silent", draining: "stopping", unreachable: "unreachable",
  refused: "refused", incompatible: "other version",
};

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
    name: fleet.name || machine.hostname || "this machine",
    here: true,
    state: status.draining ? "draining" : "usable",
    reason: "", hint: "",
    tier: machine.tier,
    chip: machine.product || machine.gpu || machine.cpu,
    accelerator: machine.accelerator,
    total: card ? machine.card_bytes : machine.memory_bytes,
    free: card ? machine.card_free_bytes : machine.available_bytes,
    running: status.requests.running,
    waiting: status.requests.waiting,
    models: status.engines.map((engine) => ({
      name: engine.part_of || engine.model,
      state: engine.state === "ready" ? "loaded" : engine.state,
      speed: engine.speed,
      part_first: engine.part_of ? engine.first_layer : 0,
      part_last: engine.part_of ? engine.last_layer : 0,
      note: engine.error || (engine.state === "loading" && engine.stage) || "",
      bytes: engine.memory_bytes,
      helping: engine.assisting,
    })),
    link: null,
  };
  const peers = [...state.peers.values()].map((peer) => ({
    ...peer,
    id: peer.node_id,
    total: peer.memory_bytes,
    free: peer.available_bytes,
    link: peer.state === "usable" ? { rtt_ms: peer.rtt_ms, bytes_per_s: peer.bytes_per_s, doubtful: peer.link_doubtful,
      kind: peer.paths.find((path) => path.in_use)?.kind ?? "" } : null,
  }));
  peers.sort((one, other) => one.name.localeCompare(other.name) || one.id.localeCompare(other.id));
  return [here, ...peers];
}

export function fleetView() {
  const all = machines();
  const usable = all.filter((machine) => machine.state === "usable");
  const total = usable.reduce((sum, machine) => sum + machine.total, 0);
  const { requests } = state.status;
  if (shown < all.length) {
    shown += STEP;
    if (shown < all.length) redraw();
  }
  return [
    h("div", { class: "stage" },
      picture(all, shown),
      h("dl", { class: "figures" },
        figure("Machines", all.length === usable.length ? count(all.length) : `${usable.length} of ${all.length}`,
          all.length === usable.length ? "all usable" : "usable"),
        figure("Memory", memory(total), "of the usable ones"),
        figure("Running", count(requests.running), requests.waiting ? `${requests.waiting} waiting` : "none waiting"),
        figure("Answered", count(requests.completed), requests.failed ? `${count(requests.failed)} failed` : "since the start"))),
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

function figure(name, value, more) {
  return h("div", null, h("dt", null, name), h("dd", null, h("b", null, value), " ", h("small", null, more)));
}

function machineRow(machine) {
  const out = machine.state !== "usable";
  const used = machine.total && machine.free ? machine.total - machine.free : 0;
  return h("li", { key: machine.id, class: out ? "out" : null },
    h("div", { class: "who" },
      h("h3", null, machine.name, machine.here && h("small", null, " this machine")),
      h("p", { class: "quiet" }, [machine.tier && `${machine.tier}`, machine.chip, machine.accelerator].filter(Boolean).join(" · ") || none),
      h("p", { class: `state ${machine.state}` }, WORDS[machine.state] ?? machine.state,
        machine.heard_s > 5 && out && ` · last heard ${seconds(machine.heard_s)} ago`)),
    h("div", { class: "memory" },
      machine.total
        ? [h("p", null, used ? `${memory(used)} of ${memory(machine.total)} in use` : memory(machine.total)),
           used > 0 && bar(used, machine.total, "memory in use")]
        : h("p", { class: "quiet" }, "memory unknown")),
    h("div", { class: "load" },
      h("p", null, machine.running || machine.waiting
        ? [counted(machine.running, "request"), machine.waiting > 0 && `, ${machine.waiting} waiting`] : h("span", { class: "quiet" }, "idle")),
      machine.link && h("p", { class: "quiet" }, linkText(machine.link))),
    h("div", { class: "held" },
      out && machine.reason && h("p", { class: "why" }, machine.reason, machine.hint && [" ", h("span", { class: "quiet" }, machine.hint)]),
      modelList(machine.models ?? [])));
}

function modelList(models) {
  if (!models.length) return h("p", { class: "quiet" }, "no model");
  const order = { loaded: 0, loading: 1, failed: 2 };
  const sorted = [...models].sort((one, other) => (order[one.state] ?? 3) - (order[other.state] ?? 3));
  return h("ul", { class: "models" }, sorted.map((model, at) =>
    h("li", { key: `${model.name} ${model.part_first} ${at}` },
      h("span", { class: "name" }, short(model.name)), " ",
      h("span", { class: `tag ${model.state}` }, model.state,
        model.part_last > 0 && ` layers ${model.part_first}–${model.part_last - 1}`),
      model.speed.prefill_tok_s > 0 && h("span", { class: "quiet" },
        ` reads ${speed(model.speed.prefill_tok_s)}, writes ${speed(model.speed.decode_tok_s)}`, model.speed.doubt && " (in doubt)", model.capped && " (not believed)"),
      model.bytes > 0 && h("span", { class: "quiet" }, `${model.speed.prefill_tok_s > 0 ? "," : ""} ${memory(model.bytes)}`),
      model.helping > 0 && h("span", { class: "quiet" }, " helping another machine"),
      model.note && h("span", { class: "why" }, ` ${model.note}`))));
}

export function linkText(link) {
  const parts = [link.kind, link.bytes_per_s ? `${bytes(link.bytes_per_s)}/s${link.doubtful ? " (in doubt)" : ""}` : "speed not measured",
    link.rtt_ms !== null && link.rtt_ms !== undefined && `${link.rtt_ms < 10 ? link.rtt_ms.toFixed(1) : count(link.rtt_ms)} ms`];
  return parts.filter(Boolean).join(" · ");
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
