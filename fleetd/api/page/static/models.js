// Models: what a machine has, what there is room for, there or on another machine, and what the hub has.

import { call, events, get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { bar, heldTogether, machines, short } from "/page/fleet.js";
import { lookAt, models, refresh, there } from "/page/listing.js";
import { hereName, redraw, say, state } from "/page/store.js";
import { bytes, count, stateWord } from "/page/units.js";
import { whatIf } from "/page/whatif.js";

/** Machine and name → {name, text, done, total, failed, abort} of what is under way or went wrong. */
const work = new Map();
/** What has been asked for once and wants a second click: the removal or the download of a model. */
let asked = "";
/** The words that people look for. */
let words = "";
/** What the hub has: {words, waiting, error} or an answer of the daemon. */
let found = null;

/** The models that are looked at: those of this machine or of another. */
function looked() {
  return there.on ? there : models;
}

/** What people call the machine whose models are looked at; "" is this one. */
function machineName() {
  return there.on && (state.peers.get(there.on)?.name ?? there.on);
}

function key(name, on = there.on) {
  return `${on} ${name}`;
}

function workOn(name) {
  return work.get(key(name));
}

/** Have the machine that is looked at do something with a model; its events tell how far it is. */
async function run(verb, name, text, done, abort) {
  const on = there.on;
  const place = on ? ` on ${machineName()}` : "";
  const mine = { name, text, abort };
  work.set(key(name, on), mine);
  redraw();
  try {
    const body = on ? { model: name, stream: true, on } : { model: name, stream: true };
    const response = await call("POST", `/fleet/v1/models/${verb}`, body, { signal: abort?.signal });
    for await (const step of events(response)) {
      if (!step.done) Object.assign(mine, { text: [step.stage || text, step.file].filter(Boolean).join(" "), done: step.done_bytes, total: step.total_bytes });
      redraw();
    }
    work.delete(key(name, on));
    say(`${short(name)}${place} ${done}.`);
  } catch (error) {
    if (error.name === "AbortError") work.delete(key(name, on));
    else {
      work.set(key(name, on), { name, failed: error });
      say(error.message);
    }
  }
  await (on && on === there.on ? lookAt(on) : refresh());
}

const act = (verb, name, text) => run(verb, name, text, "is done");
const pull = (name) => run("pull", name, "downloading", "is ready", new AbortController());

async function searchHub(event) {
  event.preventDefault();
  const mine = { words: words.trim(), waiting: true };
  found = mine;
  redraw();
  let answer;
  try {
    answer = await get(`/fleet/v1/models/search?words=${encodeURIComponent(mine.words)}${there.on && `&on=${encodeURIComponent(there.on)}`}`);
  } catch (error) {
    answer = { words: mine.words, error };
  }
  // Another search has begun since.
  if (found !== mine) return;
  found = answer;
  say(answer.error ? answer.error.message : `${answer.models.length} models of the hub.`);
  redraw();
}

export function modelsView() {
  if (there.on && !state.peers.has(there.on)) lookAt("");
  const { listing, trouble } = looked();
  if (listing === null || (there.on && trouble)) {
    if (!trouble && !there.on) refresh();
    const again = () => (there.on ? lookAt(there.on) : refresh());
    return [machinePicker(), trouble
      ? h("p", { key: "trouble", class: "trouble", role: "alert" }, trouble.message, " ", there.on && h("span", { class: "quiet" }, trouble.hint), " ", h("button", { onclick: again }, "Try again"))
      : h("p", { key: "waiting", class: "quiet" }, "Waiting for the models …")];
  }
  const offered = listing.catalog.filter((model) => !model.installed && matches(model));
  const installed = listing.installed.filter(matches);
  return [
    machinePicker(),
    searchForm(),
    !words.trim() && recommendations(),
    (installed.length > 0 || !words.trim()) && h("section", { key: "installed", "aria-labelledby": "installed" }, h("h2", { id: "installed" }, `On ${machineName() || "this machine"}`),
      installed.length ? h("ul", { class: "rows modelrows" }, installed.map(installedRow)) : h("p", { class: "quiet" }, `No model is ${there.on ? "there" : "here"}. Get one below.`)),
    inPart(),
    hub(),
    !there.on && elsewhere(),
    groups(offered),
    h("p", { key: "memory", class: "quiet" }, memoryText()),
    !there.on && !words.trim() && whatIf(listing.installed),
  ];
}

/** Whose models are looked at: this machine's or another one's. */
function machinePicker() {
  const others = [...state.peers.values()];
  if (!others.length) return null;
  return h("p", { key: "machine", class: "inline" }, h("label", { for: "models-of" }, "Models of"), " ",
    h("select", { id: "models-of", value: there.on, onchange: (event) => { found = null; asked = ""; lookAt(event.target.value); } },
      h("option", { key: "here", value: "" }, `${hereName()} (this machine)`),
      others.map((peer) => h("option", { key: peer.node_id, value: peer.node_id, disabled: peer.state !== "usable" && peer.node_id !== there.on }, peer.state === "usable" ? peer.name : `${peer.name} (${stateWord(peer.state)})`))));
}

function searchForm() {
  const id = words.trim();
  return h("form", { key: "search", class: "inline", role: "search", onsubmit: searchHub },
    h("label", { for: "search", class: "unseen" }, "Search models"),
    h("input", { id: "search", type: "search", required: true, minlength: "2", value: words, autocomplete: "off", spellcheck: "false", placeholder: "Search: qwen coder, or mlx-community/Qwen3-8B-4bit",
      oninput: (event) => { words = event.target.value; redraw(); } }),
    h("button", { disabled: found?.waiting }, "Search the Hugging Face hub"),
    /^[\w.-]+\/[\w.-]+$/.test(id) && h("button", { key: "exact", type: "button", disabled: workOn(id)?.text, onclick: () => pull(id) }, `Download ${id}`),
    [...work].filter(([one, { name }]) => one === key(name) && !shownElsewhere(name)).map(([, { name }]) => h("div", { key: `work ${name}`, class: "wide" }, h("h3", null, short(name)), progress(name), stopButton(name))));
}

/** Whether its progress stands in a row of its own. */
function shownElsewhere(name) {
  const { listing } = looked();
  return [...listing.installed, ...listing.in_part].some((model) => model.name === name) || listing.catalog.some((model) => model.name === name)
    || found?.models?.some((model) => model.hub_id === name);
}

function matches(model) {
  const text = [model.name, model.hub_id, model.note, ...(model.roles ?? []), ...(model.aliases ?? [])].join(" ").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function recommendations() {
  const chosen = looked().listing.catalog.filter((model) => model.recommended.length);
  if (!chosen.length) return null;
  return h("section", { key: "recommended", "aria-labelledby": "recommended" }, h("h2", { id: "recommended" }, `Recommended for ${machineName() || "this machine"}`),
    h("ul", { class: "chosen" }, chosen.map((model) => h("li", { key: model.name },
      h("p", { class: "quiet" }, listed(model.recommended.map((work_) => ({ draft: "drafts" })[work_] ?? work_))),
      h("h3", null, model.name), h("p", null, model.note), h("p", { class: "quiet" }, sizes(model)),
      progress(model.name), model.installed ? h("p", { class: "tag loaded" }, `on ${machineName() || "this machine"}`) : buttons(model.name)))));
}

function groups(offered) {
  const places = new Map();
  for (const where of ["here", "freed", "elsewhere", "together"]) {
    for (const model of offered.filter((one) => one.fit.where === where)) {
      const title = { here: there.on ? `Fits on ${machineName()}` : "Fits here", freed: "Fits when memory is freed", elsewhere: `Fits on ${listed(model.fit.machines, "or")}`, together: `Fits on ${listed([machineName() || "this machine", ...model.fit.machines])} together` }[where];
      places.set(title, [...(places.get(title) ?? []), model]);
    }
  }
  const rest = offered.filter((model) => model.fit.where === "none");
  return [
    [...places].map(([title, fitting]) => h("section", { key: title, "aria-label": title }, h("h2", null, title, " ", h("small", { class: "quiet" }, count(fitting.length))),
      h("ul", { class: "rows modelrows" }, fitting.map(offeredRow)))),
    rest.length > 0 && h("details", { key: "rest", open: words.trim() !== "" && !places.size }, h("summary", null, `${count(rest.length)} more ${rest.length === 1 ? "is" : "are"} too large for ${machines().length > 1 ? "every machine" : machineName() || "this machine"}`),
      h("ul", { class: "rows modelrows" }, rest.map(offeredRow))),
    !offered.length && words.trim() && h("p", { key: "none", class: "quiet" }, "Nothing in the catalog has these words. The hub may have."),
  ];
}

function memoryText() {
  const { memory: budget, evictable_bytes: evictable, memory_reason: reason } = looked().listing;
  return [`Models may take ${bytes(budget.largest_bytes)} of ${there.on ? machineName() : "this machine"}'s memory; ${bytes(budget.usable_bytes)} are free for them now`,
    evictable > 0 && `, and idle ones would give back ${bytes(evictable)}`, ". ", there.on ? reason.replace("this machine", machineName()) : reason];
}

function sizes(model) {
  return `${bytes(model.download_bytes)} to download, ${bytes(model.memory_bytes)} of memory`;
}

function listed(names, word = "and") {
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} ${word} ${names.at(-1)}` : names.join("");
}

function drafter({ drafter, drafter_off }) {
  const own = { head: "its own head", sidecar: "a head beside it" }[drafter];
  if (!drafter) return "";
  if (drafter_off) return `${own ? "its head" : drafter} does not draft: ${drafter_off}`;
  return own ? `drafts with ${own}` : `${drafter} drafts for it`;
}

function tools(model) {
  return model.tools === "grammar" ? "tools by grammar" : model.tools && "tools";
}

function installedRow(model) {
  // Another machine's engines are not known here, but whether each model is loaded.
  const engine = there.on ? model.loaded && { state: "ready" } : state.status.engines.find((one) => one.model === model.name && !one.part_of);
  const at = engine ? (engine.state === "ready" ? "loaded" : engine.state) : "on disk";
  const busy = workOn(model.name)?.text;
  return h("li", { key: model.name },
    h("div", null, h("h3", null, short(model.name)),
      h("p", { class: "quiet" }, [bytes(model.weights_bytes), `${count(model.context_tokens)} tokens of context`, model.architecture, model.roles.join(", "), tools(model), model.images && "images", drafter(model)].filter(Boolean).join(" · "))),
    h("div", null, h("p", null, h("span", { class: `tag ${at}` }, at), model.pinned && h("span", { class: "tag" }, "pinned"), engine?.memory_bytes > 0 && h("span", { class: "quiet" }, ` ${bytes(engine.memory_bytes)}`)),
      engine?.state === "loading" && [h("p", { class: "quiet" }, engine.stage), engine.total > 0 && bar(engine.done, engine.total, engine.stage)],
      engine?.members?.length > 0 && h("p", { class: "quiet" }, heldTogether(engine)),
      !engine && room(model),
      engine?.error && h("p", { class: "why" }, engine.error), progress(model.name)),
    h("p", { class: "buttons" },
      engine?.state === "ready"
        ? h("button", { key: "unload", disabled: busy, onclick: () => act("unload", model.name, "unloading") }, "Unload")
        : h("button", { key: "load", disabled: busy || engine, onclick: () => act("load", model.name, "loading") }, "Load"),
      model.pinned
        ? h("button", { key: "unpin", class: "plain", disabled: busy, onclick: () => act("unpin", model.name, "unpinning") }, "Unpin")
        : h("button", { key: "pin", class: "plain", disabled: busy, title: "Load it and keep it loaded, also after a restart", onclick: () => act("pin", model.name, "loading") }, "Pin"),
      asked === model.name
        ? [h("button", { key: "sure", class: "danger", onclick: () => { asked = ""; act("remove", model.name, "removing"); } }, `Remove ${bytes(model.weights_bytes)} for good`),
           h("button", { key: "keep", class: "plain", onclick: () => { asked = ""; redraw(); } }, "Keep it")]
        : h("button", { key: "remove", class: "plain", disabled: busy, onclick: () => { asked = model.name; redraw(); } }, "Remove …")));
}

/** Models of which single layers are on the machine that is looked at. */
function inPart() {
  const shown = looked().listing.in_part.filter(matches);
  if (!shown.length) return null;
  return h("section", { key: "in-part", "aria-labelledby": "in-part" }, h("h2", { id: "in-part" }, `In part on ${machineName() || "this machine"}`),
    h("ul", { class: "rows modelrows" }, shown.map(partRow)));
}

function partRow(model) {
  const busy = workOn(model.name)?.text;
  const answers = machineName() || "this machine";
  const engine = !there.on && state.status.engines.find((one) => one.model === model.name && !one.part_of);
  return h("li", { key: `${model.name} ${model.own} ${model.from_hub}` },
    h("div", null, h("h3", null, short(model.name)),
      h("p", { class: "quiet" }, [`${count(model.layers)} of ${count(model.of_layers)} layers`, `${bytes(model.disk_bytes)} of ${bytes(model.weights_bytes)} on disk`,
        model.from_hub ? "from the hub" : "from the machine that answers"].join(" · "))),
    h("div", null, h("p", null, h("span", { class: "tag" }, "in part"), model.loaded && h("span", { class: "tag loaded" }, " loaded")),
      h("p", { class: "quiet" }, model.own ? `${answers} answers, with others` : "another machine answers"),
      engine?.members?.length > 0 && h("p", { class: "quiet" }, heldTogether(engine)), progress(model.name)),
    h("p", { class: "buttons" },
      model.own && (model.loaded
        ? h("button", { key: "unload", disabled: busy, onclick: () => act("unload", model.name, "unloading") }, "Unload")
        : h("button", { key: "load", disabled: busy, onclick: () => act("load", model.name, "loading") }, "Load")),
      asked === `part ${model.name}`
        ? [h("button", { key: "sure", class: "danger", onclick: () => { asked = ""; act("remove", model.name, "removing"); } }, `Remove ${bytes(model.disk_bytes)} for good`),
           h("button", { key: "keep", class: "plain", onclick: () => { asked = ""; redraw(); } }, "Keep it")]
        : h("button", { key: "remove", class: "plain", disabled: busy || (model.loaded && !model.own), title: model.loaded && !model.own && "Another machine uses these layers", onclick: () => { asked = `part ${model.name}`; redraw(); } }, "Remove …")));
}

function offeredRow(model) {
  const others = machines().filter((one) => !one.here && one.id !== there.on && one.state === "usable" && (one.models ?? []).some((each) => each.name === model.name || each.name === model.hub_id));
  return h("li", { key: model.name },
    h("div", null, h("h3", null, model.name, model.recommended.length > 0 && h("span", { class: "tag loaded" }, " recommended")),
      h("p", null, model.note),
      h("p", { class: "quiet" }, [model.roles.join(", "), `${count(model.context_tokens)} tokens of context`, tools(model)].filter(Boolean).join(" · "))),
    h("div", null, h("p", null, sizes(model)), room(model),
      others.length > 0 && h("p", { class: "quiet" }, `on ${listed(others.map((one) => one.name))}; copied from there`),
      progress(model.name)),
    buttons(model.name, { fit: model.fit }));
}

/** What is missing for a model to load here. */
function room({ fit }) {
  if (fit.where === "here") return null;
  if (fit.where === "together") return h("p", { class: "quiet" }, `${listed([machineName() || "this machine", ...fit.machines])} hold it together`);
  const text = fit.where === "freed" ? `loads once ${bytes(fit.short_bytes)} more are free` : `${machineName() || "this machine"} is ${bytes(fit.short_bytes)} short`;
  return h("p", { class: "quiet" }, text, fit.machines.length > 0 && fit.where !== "freed" && `; fits on ${listed(fit.machines, "or")}`);
}

/** Download, or Stop; what cannot be loaded here is asked for twice. */
function buttons(name, { fit = { where: "here" } } = {}) {
  if (workOn(name)?.abort) return h("p", { class: "buttons" }, stopButton(name));
  const loads = fit.where === "here" || fit.where === "freed";
  if (loads || asked === `pull ${name}`) {
    return h("p", { class: "buttons" },
      h("button", { key: "pull", disabled: workOn(name)?.text, onclick: () => { asked = ""; pull(name); } }, loads ? "Download" : "Download all the same"),
      !loads && h("button", { key: "not", class: "plain", onclick: () => { asked = ""; redraw(); } }, "Leave it"));
  }
  return h("p", { class: "buttons" }, h("button", { key: "ask", class: "plain", onclick: () => { asked = `pull ${name}`; redraw(); } }, "Download …"));
}

function stopButton(name) {
  return workOn(name)?.abort && h("button", { key: "stop", type: "button", onclick: () => workOn(name)?.abort.abort() }, "Stop");
}

function hub() {
  if (!found) return null;
  return h("section", { key: "hub", "aria-labelledby": "hub" }, h("h2", { id: "hub" }, "On the Hugging Face hub: ", h("span", { class: "name" }, found.words)),
    found.waiting && h("p", { class: "quiet" }, "Asking the hub …"),
    found.error && h("p", { class: "trouble", role: "alert" }, found.error.message, " ", h("span", { class: "quiet" }, found.error.hint)),
    found.models && [
      h("ul", { class: "rows modelrows" }, found.models.map(foundRow)),
      h("p", { class: "quiet" }, !found.models.length && "Nothing that fleetd can load has these words in its name. ",
        found.others > 0 && `${count(found.others)} more are of types or files that fleetd does not read.`)]);
}

function foundRow(model) {
  const known = model.download_bytes > 0;
  const here = model.installed || looked().listing.installed.some((one) => one.name === model.hub_id);
  return h("li", { key: model.hub_id },
    h("div", null, h("h3", null, model.hub_id), h("p", { class: "quiet" }, [model.files, model.architecture, `${count(model.downloads)} downloads a month`].join(" · "))),
    h("div", null, h("p", null, known ? sizes(model) : "The hub does not tell its size."), known && room(model),
      model.gated && h("p", { class: "why" }, "Accept its terms on its page first."), progress(model.hub_id)),
    here ? h("p", { class: "tag loaded" }, `on ${machineName() || "this machine"}`) : buttons(model.hub_id, { fit: model.fit }));
}

function progress(name) {
  const one = workOn(name);
  if (!one) return null;
  if (one.failed) return h("p", { class: "trouble", role: "alert" }, one.failed.message, " ", h("span", { class: "quiet" }, one.failed.hint));
  return [h("p", { class: "quiet" }, one.text, one.total > 0 && `: ${bytes(one.done)} of ${bytes(one.total)}`), one.total > 0 && bar(one.done, one.total, one.text)];
}

function elsewhere() {
  const found = new Map();
  for (const machine of machines()) {
    if (machine.here) continue;
    for (const model of machine.models ?? []) {
      if (models.listing.installed.some((one) => one.name === model.name)) continue;
      found.set(model.name, [...(found.get(model.name) ?? []), `${machine.name} (${machine.state === "usable" ? model.state : stateWord(machine.state)})`]);
    }
  }
  if (!found.size) return null;
  return h("section", { key: "elsewhere", "aria-labelledby": "elsewhere" }, h("h2", { id: "elsewhere" }, "On other machines"),
    h("ul", { class: "plainlist" }, [...found].map(([name, where]) => h("li", { key: name }, h("span", { class: "name" }, short(name)), " ", h("span", { class: "quiet" }, where.join(", "))))));
}
