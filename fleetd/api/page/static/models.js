// Models: what is here, what there is room for, here or on another machine, and what the hub has.

import { call, events, get, post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { bar, machines, short } from "/page/fleet.js";
import { models, refresh } from "/page/listing.js";
import { redraw, say, state } from "/page/store.js";
import { bytes, count } from "/page/units.js";
import { whatIf } from "/page/whatif.js";

/** Name → {text, done, total, failed, abort} of what is under way or went wrong. */
const work = new Map();
/** What has been asked for once and wants a second click: the removal or the download of a model. */
let asked = "";
/** The words that people look for. */
let words = "";
/** What the hub has: {words, waiting, error} or an answer of the daemon. */
let found = null;

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

async function searchHub(event) {
  event.preventDefault();
  const mine = { words: words.trim(), waiting: true };
  found = mine;
  redraw();
  let answer;
  try {
    answer = await get(`/fleet/v1/models/search?words=${encodeURIComponent(mine.words)}`);
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
  const { listing, trouble } = models;
  if (listing === null) {
    if (!trouble) refresh();
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: refresh }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the models …");
  }
  const offered = listing.catalog.filter((model) => !model.installed && matches(model));
  const installed = listing.installed.filter(matches);
  return [
    searchForm(),
    !words.trim() && recommendations(),
    (installed.length > 0 || !words.trim()) && h("section", { key: "installed", "aria-labelledby": "installed" }, h("h2", { id: "installed" }, "On this machine"),
      installed.length ? h("ul", { class: "rows modelrows" }, installed.map(installedRow)) : h("p", { class: "quiet" }, "No model is here. Get one below.")),
    hub(),
    elsewhere(),
    groups(offered),
    h("p", { key: "memory", class: "quiet" }, memoryText()),
    !words.trim() && whatIf(listing.installed),
  ];
}

function searchForm() {
  const id = words.trim();
  return h("form", { key: "search", class: "inline", role: "search", onsubmit: searchHub },
    h("label", { for: "search", class: "unseen" }, "Search models"),
    h("input", { id: "search", type: "search", required: true, minlength: "2", value: words, autocomplete: "off", spellcheck: "false", placeholder: "Search: qwen coder, or mlx-community/Qwen3-8B-4bit",
      oninput: (event) => { words = event.target.value; redraw(); } }),
    h("button", { disabled: found?.waiting }, "Search the Hugging Face hub"),
    /^[\w.-]+\/[\w.-]+$/.test(id) && h("button", { key: "exact", type: "button", disabled: work.get(id)?.text, onclick: () => pull(id) }, `Download ${id}`),
    [...work].filter(([name]) => !shownElsewhere(name)).map(([name]) => h("div", { key: `work ${name}`, class: "wide" }, h("h3", null, short(name)), progress(name), stopButton(name))));
}

/** Whether its progress stands in a row of its own. */
function shownElsewhere(name) {
  return models.listing.installed.some((model) => model.name === name) || models.listing.catalog.some((model) => model.name === name)
    || found?.models?.some((model) => model.hub_id === name);
}

function matches(model) {
  const text = [model.name, model.hub_id, model.note, ...(model.roles ?? []), ...(model.aliases ?? [])].join(" ").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function recommendations() {
  const chosen = models.listing.catalog.filter((model) => model.recommended.length);
  if (!chosen.length) return null;
  return h("section", { key: "recommended", "aria-labelledby": "recommended" }, h("h2", { id: "recommended" }, "Recommended for this machine"),
    h("ul", { class: "chosen" }, chosen.map((model) => h("li", { key: model.name },
      h("p", { class: "quiet" }, listed(model.recommended.map((work_) => ({ draft: "drafts" })[work_] ?? work_))),
      h("h3", null, model.name), h("p", null, model.note), h("p", { class: "quiet" }, sizes(model)),
      progress(model.name), model.installed ? h("p", { class: "tag loaded" }, "on this machine") : buttons(model.name)))));
}

function groups(offered) {
  const places = new Map();
  for (const where of ["here", "freed", "elsewhere"]) {
    for (const model of offered.filter((one) => one.served && one.fit.where === where)) {
      const title = { here: "Fits here", freed: "Fits when memory is freed", elsewhere: `Fits on ${listed(model.fit.machines, "or")}` }[where];
      places.set(title, [...(places.get(title) ?? []), model]);
    }
  }
  const rest = offered.filter((model) => !model.served || model.fit.where === "none");
  return [
    [...places].map(([title, fitting]) => h("section", { key: title, "aria-label": title }, h("h2", null, title, " ", h("small", { class: "quiet" }, count(fitting.length))),
      h("ul", { class: "rows modelrows" }, fitting.map(offeredRow)))),
    rest.length > 0 && h("details", { key: "rest", open: words.trim() !== "" && !places.size }, h("summary", null, `${count(rest.length)} more ${rest.length === 1 ? "is" : "are"} too large for ${machines().length > 1 ? "every machine" : "this machine"}`),
      h("ul", { class: "rows modelrows" }, rest.map(offeredRow))),
    !offered.length && words.trim() && h("p", { key: "none", class: "quiet" }, "Nothing in the catalog has these words. The hub may have."),
  ];
}

function memoryText() {
  const { memory: budget, evictable_bytes: evictable } = models.listing;
  return [`Models may take ${bytes(budget.largest_bytes)} of this machine's memory; ${bytes(budget.usable_bytes)} are free for them now`,
    evictable > 0 && `, and idle ones would give back ${bytes(evictable)}`, ". ", models.listing.memory_reason];
}

function sizes(model) {
  return `${bytes(model.download_bytes)} to download, ${bytes(model.memory_bytes)} of memory`;
}

function listed(names, word = "and") {
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} ${word} ${names.at(-1)}` : names.join("");
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
    h("div", null, h("p", null, h("span", { class: `tag ${at}` }, at), model.pinned && h("span", { class: "tag" }, "pinned"), engine?.memory_bytes > 0 && h("span", { class: "quiet" }, ` ${bytes(engine.memory_bytes)}`)),
      engine?.state === "loading" && [h("p", { class: "quiet" }, engine.stage), engine.total > 0 && bar(engine.done, engine.total, engine.stage)],
      engine?.error && h("p", { class: "why" }, engine.error), progress(model.name)),
    h("p", { class: "buttons" },
      engine?.state === "ready"
        ? h("button", { key: "unload", disabled: busy, onclick: () => act(model.name, "unloading", "/fleet/v1/models/unload") }, "Unload")
        : h("button", { key: "load", disabled: busy || engine, onclick: () => act(model.name, "loading", "/fleet/v1/models/load") }, "Load"),
      model.pinned
        ? h("button", { key: "unpin", class: "plain", disabled: busy, onclick: () => act(model.name, "unpinning", "/fleet/v1/models/unpin") }, "Unpin")
        : h("button", { key: "pin", class: "plain", disabled: busy, title: "Load it and keep it loaded, also after a restart", onclick: () => act(model.name, "loading", "/fleet/v1/models/pin") }, "Pin"),
      asked === model.name
        ? [h("button", { key: "sure", class: "danger", onclick: () => { asked = ""; act(model.name, "removing", "/fleet/v1/models/remove"); } }, `Remove ${bytes(model.weights_bytes)} for good`),
           h("button", { key: "keep", class: "plain", onclick: () => { asked = ""; redraw(); } }, "Keep it")]
        : h("button", { key: "remove", class: "plain", disabled: busy, onclick: () => { asked = model.name; redraw(); } }, "Remove …")));
}

function offeredRow(model) {
  const others = machines().filter((one) => !one.here && one.state === "usable" && (one.models ?? []).some((each) => each.name === model.name || each.name === model.hub_id));
  return h("li", { key: model.name },
    h("div", null, h("h3", null, model.name, model.recommended.length > 0 && h("span", { class: "tag loaded" }, " recommended")),
      h("p", null, model.note),
      h("p", { class: "quiet" }, [model.roles.join(", "), `${count(model.context_tokens)} tokens of context`, tools(model)].filter(Boolean).join(" · "))),
    h("div", null, h("p", null, sizes(model)), room(model),
      others.length > 0 && h("p", { class: "quiet" }, `on ${listed(others.map((one) => one.name))}; copied from there`),
      !model.served && h("p", { class: "quiet" }, "fleetd cannot answer with it yet"), progress(model.name)),
    buttons(model.name, { fit: model.fit, served: model.served }));
}

/** What is missing for a model to load here. */
function room({ fit }) {
  if (fit.where === "here") return null;
  const text = fit.where === "freed" ? `loads once ${bytes(fit.short_bytes)} more are free` : `this machine is ${bytes(fit.short_bytes)} short`;
  return h("p", { class: "quiet" }, text, fit.machines.length > 0 && fit.where !== "freed" && `; fits on ${listed(fit.machines, "or")}`);
}

/** Download, or Stop; what cannot be loaded here is asked for twice. */
function buttons(name, { fit = { where: "here" }, served = true } = {}) {
  if (work.get(name)?.abort) return h("p", { class: "buttons" }, stopButton(name));
  const loads = fit.where === "here" || fit.where === "freed";
  if (loads || asked === `pull ${name}`) {
    return h("p", { class: "buttons" },
      h("button", { key: "pull", disabled: !served || work.get(name)?.text, onclick: () => { asked = ""; pull(name); } }, loads ? "Download" : "Download all the same"),
      !loads && h("button", { key: "not", class: "plain", onclick: () => { asked = ""; redraw(); } }, "Leave it"));
  }
  return h("p", { class: "buttons" }, h("button", { key: "ask", class: "plain", disabled: !served, onclick: () => { asked = `pull ${name}`; redraw(); } }, "Download …"));
}

function stopButton(name) {
  return work.get(name)?.abort && h("button", { key: "stop", type: "button", onclick: () => work.get(name)?.abort.abort() }, "Stop");
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
  const here = model.installed || models.listing.installed.some((one) => one.name === model.hub_id);
  return h("li", { key: model.hub_id },
    h("div", null, h("h3", null, model.hub_id), h("p", { class: "quiet" }, [model.files, model.architecture, `${count(model.downloads)} downloads a month`].join(" · "))),
    h("div", null, h("p", null, known ? sizes(model) : "The hub does not tell its size."), known && room(model),
      model.gated && h("p", { class: "why" }, "Accept its terms on its page first."), progress(model.hub_id)),
    here ? h("p", { class: "tag loaded" }, "on this machine") : buttons(model.hub_id, { fit: model.fit }));
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
      if (models.listing.installed.some((one) => one.name === model.name)) continue;
      found.set(model.name, [...(found.get(model.name) ?? []), `${machine.name} (${machine.state === "usable" ? model.state : machine.state})`]);
    }
  }
  if (!found.size) return null;
  return h("section", { key: "elsewhere", "aria-labelledby": "elsewhere" }, h("h2", { id: "elsewhere" }, "On other machines"),
    h("ul", { class: "plainlist" }, [...found].map(([name, where]) => h("li", { key: name }, h("span", { class: "name" }, short(name)), " ", h("span", { class: "quiet" }, where.join(", "))))));
}
