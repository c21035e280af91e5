// Models: what is here, what could be, and where it fits.

import { call, events, get, post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { bar, machines, short } from "/page/fleet.js";
import { onChange, redraw, say, state } from "/page/store.js";
import { bytes, count, memory } from "/page/units.js";

let listing = null;
let trouble = null;
let fetching = false;
/** Name → {text, done, total, failed, abort} of what is under way or went wrong. */
const work = new Map();
/** The model whose removal has been asked for once. */
let removing = "";

async function refresh() {
  if (fetching) return;
  fetching = true;
  try {
    listing = await get("/fleet/v1/models");
    trouble = null;
  } catch (error) {
    trouble = error;
  }
  fetching = false;
  redraw();
}

let engines = "";
onChange((change) => {
  if (!change.status) return;
  // Loaded, unloaded, by whomever: what fits has changed.
  const now = change.status.engines.map((engine) => `${engine.model} ${engine.state}`).join();
  if (now !== engines && listing !== null) refresh();
  engines = now;
});

async function act(name, text, path) {
  work.set(name, { text });
  redraw();
  try {
    await post(path, { model: name });
    work.delete(name);
    say(`${short(name)}: done.`);
  } catch (error) {
    work.set(name, { failed: error });
    say(error.message);
  }
  await refresh();
}

async function pull(name) {
  const abort = new AbortController();
  work.set(name, { text: "downloading", abort });
  redraw();
  try {
    const response = await call("POST", "/fleet/v1/models/pull", { model: name }, { signal: abort.signal });
    for await (const step of events(response)) {
      if (!step.done) work.set(name, { text: [step.stage || "downloading", step.file].filter(Boolean).join(" "), done: step.done_bytes, total: step.total_bytes, abort });
      redraw();
    }
    work.delete(name);
    say(`${short(name)} is here.`);
  } catch (error) {
    if (error.name === "AbortError") work.delete(name);
    else work.set(name, { failed: error });
  }
  await refresh();
}

export function modelsView() {
  if (listing === null) {
    if (!trouble) refresh();
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: refresh }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the models …");
  }
  const { memory: budget } = listing;
  const offered = listing.catalog.filter((model) => !model.installed);
  return [
    h("p", null, `${memory(budget.usable_bytes)} for models now`, listing.evictable_bytes > 0 && `, and ${memory(listing.evictable_bytes)} that idle ones would give back`,
      `; at most ${memory(budget.largest_bytes)} were all of this machine free.`),
    h("section", { "aria-labelledby": "installed" }, h("h2", { id: "installed" }, "On this machine"),
      listing.installed.length ? h("ul", { class: "rows modelrows" }, listing.installed.map(installedRow)) : h("p", { class: "quiet" }, "No model is here. Get one below.")),
    elsewhere(),
    h("section", { "aria-labelledby": "offered" }, h("h2", { id: "offered" }, "To be had"),
      h("form", { class: "inline", onsubmit: pullTyped },
        h("label", { for: "hub" }, "A model of the hub, by its id"), h("input", { id: "hub", name: "model", autocomplete: "off", spellcheck: "false", placeholder: "mlx-community/Qwen3-8B-4bit", required: true }),
        h("button", null, "Download")),
      [...work].filter(([name]) => !known(name)).map(([name]) => h("div", { key: name, class: "rows" }, h("h3", null, short(name)), progress(name))),
      h("ul", { class: "rows modelrows" }, offered.map(offeredRow))),
  ];
}

function known(name) {
  return listing.installed.some((model) => model.name === name) || listing.catalog.some((model) => model.name === name);
}

function pullTyped(event) {
  event.preventDefault();
  const field = event.target.elements.model;
  pull(field.value.trim());
  field.value = "";
}

function tools(model) {
  return model.tools === "grammar" ? "tools by grammar" : model.tools && "tools";
}

function installedRow(model) {
  const engine = state.status.engines.find((one) => one.model === model.name && !one.part_of);
  const at = engine ? (engine.state === "ready" ? "loaded" : engine.state) : "on disk";
  const busy = work.get(model.name)?.text;
  return h("li", { key: model.name },
    h("div", null, h("h3", null, short(model.name)),
      h("p", { class: "quiet" }, [bytes(model.weights_bytes), `${count(model.context_tokens)} tokens of context`, model.architecture, model.roles.join(", "), tools(model)].filter(Boolean).join(" · "))),
    h("div", null, h("p", null, h("span", { class: `tag ${at}` }, at), model.pinned && h("span", { class: "tag" }, "pinned"), engine?.memory_bytes > 0 && h("span", { class: "quiet" }, ` ${memory(engine.memory_bytes)}`)),
      engine?.state === "loading" && [h("p", { class: "quiet" }, engine.stage), engine.total > 0 && bar(engine.done, engine.total, engine.stage)],
      engine?.error && h("p", { class: "why" }, engine.error), progress(model.name)),
    h("p", { class: "buttons" },
      engine?.state === "ready"
        ? h("button", { key: "unload", disabled: busy, onclick: () => act(model.name, "unloading", "/fleet/v1/models/unload") }, "Unload")
        : h("button", { key: "load", disabled: busy || engine, onclick: () => act(model.name, "loading", "/fleet/v1/models/load") }, "Load"),
      model.pinned
        ? h("button", { key: "unpin", class: "plain", disabled: busy, onclick: () => act(model.name, "unpinning", "/fleet/v1/models/unpin") }, "Unpin")
        : h("button", { key: "pin", class: "plain", disabled: busy, title: "Load it and keep it loaded, also after a restart", onclick: () => act(model.name, "loading", "/fleet/v1/models/pin") }, "Pin"),
      removing === model.name
        ? [h("button", { key: "sure", class: "danger", onclick: () => { removing = ""; act(model.name, "removing", "/fleet/v1/models/remove"); } }, `Remove ${bytes(model.weights_bytes)} for good`),
           h("button", { key: "keep", class: "plain", onclick: () => { removing = ""; redraw(); } }, "Keep it")]
        : h("button", { key: "remove", class: "plain", disabled: busy, onclick: () => { removing = model.name; redraw(); } }, "Remove …")));
}

function offeredRow(model) {
  const here = model.fits ? "fits here now" : model.fits_if_freed ? "fits here once memory is free" : "too large for this machine";
  const others = machines().filter((one) => !one.here && one.state === "usable" && (one.models ?? []).some((each) => each.name === model.name || each.name === model.hub_id));
  const roomy = machines().filter((one) => !one.here && one.state === "usable" && one.total * 0.7 > model.memory_bytes && !others.includes(one));
  return h("li", { key: model.name },
    h("div", null, h("h3", null, model.name), h("p", { class: "quiet" }, [model.roles.join(", "), `${count(model.context_tokens)} tokens of context`, tools(model), model.hub_id].filter(Boolean).join(" · "))),
    h("div", null, h("p", null, `needs ${memory(model.memory_bytes)}: `, h("span", { class: model.fits ? "tag loaded" : "tag" }, here)),
      others.length > 0 && h("p", { class: "quiet" }, `on ${others.map((one) => one.name).join(", ")}; copied from there`),
      roomy.length > 0 && h("p", { class: "quiet" }, `by their memory also: ${roomy.slice(0, 6).map((one) => one.name).join(", ")}${roomy.length > 6 ? ` and ${roomy.length - 6} more` : ""}`),
      !model.served && h("p", { class: "quiet" }, "fleetd cannot answer with it yet"), progress(model.name)),
    h("p", { class: "buttons" }, work.get(model.name)?.abort
      ? h("button", { key: "stop", onclick: () => work.get(model.name)?.abort.abort() }, "Stop")
      : h("button", { key: "pull", disabled: !model.served || work.get(model.name)?.text, onclick: () => pull(model.name) }, "Download")));
}

function progress(name) {
  const one = work.get(name);
  if (!one) return null;
  if (one.failed) return h("p", { class: "trouble", role: "alert" }, one.failed.message, " ", h("span", { class: "quiet" }, one.failed.hint));
  return [h("p", { class: "quiet" }, one.text, one.total > 0 && `: ${bytes(one.done)} of ${bytes(one.total)}`), one.total > 0 && bar(one.done, one.total, one.text)];
}

function elsewhere() {
  const found = new Map();
  for (const machine of machines()) {
    if (machine.here) continue;
    for (const model of machine.models ?? []) {
      if (listing.installed.some((one) => one.name === model.name)) continue;
      found.set(model.name, [...(found.get(model.name) ?? []), `${machine.name} (${machine.state === "usable" ? model.state : machine.state})`]);
    }
  }
  if (!found.size) return null;
  return h("section", { "aria-labelledby": "elsewhere" }, h("h2", { id: "elsewhere" }, "On other machines"),
    h("ul", { class: "plainlist" }, [...found].map(([name, where]) => h("li", { key: name }, h("span", { class: "name" }, short(name)), " ", h("span", { class: "quiet" }, where.join(", "))))));
}
