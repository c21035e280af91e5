// The settings that the daemon runs with, as people say them, and a change of those that matter.

import { call, get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { hereName, redraw, say, state } from "/page/store.js";
import { bytes, counted } from "/page/units.js";

let found = null;
let trouble = null;
let asking = false;
/** The setting that is being changed: its key, the text of its field, and what went wrong. */
const edit = { key: "", text: "", busy: false, error: null };

async function refresh() {
  if (asking) return;
  asking = true;
  try {
    found = await get("/fleet/v1/settings");
    trouble = null;
  } catch (error) {
    trouble = error;
  }
  asking = false;
  redraw();
}

/** The value that the daemon runs with; undefined until it is known. */
export function setting(key) {
  if (found === null && !trouble && state.link === "live") refresh();
  return found?.settings.find((one) => one.key === key)?.value;
}

// ---- As people say them ----------------------------------------------------------------------------------

/** Key → what it is about, its value in words, and how it is typed if not as it is written. */
const WORDS = {
  "models.default": { name: "Default model" },
  "engine.idle_unload_s": { name: "An unused model is unloaded", say: (value) => (value ? `after ${duration(value)} idle` : "never"), unit: "minutes (0: never)", shown: (value) => value / 60, read: (text) => Math.round(Number(text) * 60) },
  "engine.memory_fraction": { name: "Models may hold", say: (value) => `${Math.round(value * 100)} % of the usable memory`, unit: "%", shown: (value) => Math.round(value * 100), read: (text) => Number(text) / 100 },
  "fleet.name": { name: "Name of this machine", say: (value) => value || `${hereName()}, from the system` },
  "fleet.local_only": { name: "Prompts typed here", choices: [[false, "may go to machines of the fleet that may see them"], [true, "never leave this machine"]] },
  "smart_prefill.enabled": { name: "Smart prefill", choices: [[false, "only when a request asks for it"], [true, "for long prompts, asked for or not (lossy)"]] },
  "speculation.mode": { name: "Drafting", choices: [["auto", "when it saves time"], ["on", "always"], ["off", "never"]] },
  "cache.disk": { name: "Work done on prompts", choices: [[true, "is kept on this disk, encrypted"], [false, "is not kept on the disk"]] },
  "cache.quota_bytes": { name: "Room for it on the disk", say: (value) => (value ? `at most ${bytes(value)}` : "a tenth of what is free, at most 34 GB"), unit: "like 20 GB (0: a tenth of what is free)", shown: (value) => (value ? bytes(value) : "0") },
  "power.keep_awake": { name: "While this machine computes", choices: [[true, "it does not go to sleep by itself"], [false, "it may go to sleep"]] },
};

function duration(value) {
  if (value % 3600 === 0) return `${value / 3600} h`;
  return value % 60 === 0 ? `${value / 60} min` : counted(value, "second");
}

/** A value of a setting in words. */
export function inWords(one, value) {
  const words = WORDS[one.key];
  const choice = words?.choices?.find(([each]) => each === value);
  if (choice) return choice[1];
  if (words?.say) return words.say(value);
  if (value === "" || (Array.isArray(value) && !value.length)) return "not set";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value === "boolean") return value ? "on" : "off";
  if (one.type === "bytes") return value ? bytes(value) : "chosen by fleetd";
  return one.key.endsWith("_s") && value ? duration(value) : String(value);
}

// ---- The view --------------------------------------------------------------------------------------------

export function settingsView() {
  if (found === null) {
    if (!trouble) refresh();
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: () => { trouble = null; refresh(); } }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the settings …");
  }
  const { settings } = found;
  const matter = Object.keys(WORDS).map((key) => settings.find((one) => one.key === key)).filter(Boolean);
  const others = settings.filter((one) => !matter.includes(one));
  const changed = others.filter((one) => one.origin !== "default" || "next" in one);
  const usual = others.filter((one) => !changed.includes(one));
  const waiting = settings.filter((one) => "next" in one);
  return [
    h("p", { class: "quiet" }, "The daemon reads its settings when it starts, from ", h("code", null, found.file), "."),
    found.trouble && h("p", { class: "trouble", role: "alert" }, "With this file the daemon would not start again: ", found.trouble),
    waiting.length > 0 && h("p", { class: "why", role: "status" }, `${counted(waiting.length, "change")} will count from the daemon's next start: restart the service, or end `, h("code", null, "fleetd run"), " and start it again."),
    list(matter),
    changed.length > 0 && [h("h2", null, "Also changed"), list(changed)],
    h("details", null, h("summary", null, `${usual.length} more at their defaults`), list(usual)),
  ];
}

function list(some) {
  return h("dl", { class: "settings" }, some.map((one) => h("div", { key: one.key, class: one.origin === "default" ? null : "changed" },
    h("dt", null, WORDS[one.key] ? [WORDS[one.key].name, h("br"), h("small", null, h("code", null, one.key))] : h("code", null, one.key)),
    h("dd", null, edit.key === one.key ? form(one) : value(one)))));
}

function value(one) {
  // What the environment or a flag says wins over the file.
  const stronger = one.origin.startsWith("environment") || one.origin.startsWith("flag");
  return [
    h("p", { class: "inline" }, h("b", null, inWords(one, one.value)), "next" in one && h("span", { class: "why" }, ` → ${inWords(one, one.next)} after a restart`),
      one.editable && !stronger && h("button", { class: "plain small", "aria-label": `Edit: ${WORDS[one.key]?.name ?? one.key}`, onclick: () => startEdit(one) }, "Edit")),
    h("p", { class: "quiet" }, !WORDS[one.key] && words(one.why), one.origin !== "default" && ` From ${one.origin}; by default ${inWords(one, one.default)}.`, stronger && one.editable && " Change it there."),
    !WORDS[one.key] && h("p", { class: "quiet" }, h("code", null, one.env))];
}

// Names of things stand between backticks.
function words(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));
}

// ---- Editing ---------------------------------------------------------------------------------------------

function startEdit(one) {
  const { shown } = WORDS[one.key] ?? {};
  const now = "next" in one ? one.next : one.value;
  Object.assign(edit, { key: one.key, text: String(shown ? shown(now) : now), busy: false, error: null });
  redraw();
  requestAnimationFrame(() => document.getElementById("setting")?.focus());
}

function form(one) {
  const { choices, unit, name } = WORDS[one.key];
  return h("form", { class: "inline", onsubmit: (event) => { event.preventDefault(); save(one); }, onkeydown: (event) => { if (event.key === "Escape") endEdit(); } },
    h("label", { for: "setting", class: "unseen" }, name),
    choices
      ? h("select", { id: "setting", value: edit.text, onchange: (event) => { edit.text = event.target.value; } }, choices.map(([each, text]) => h("option", { key: String(each), value: String(each) }, text)))
      : h("input", { id: "setting", value: edit.text, autocomplete: "off", spellcheck: "false", "aria-describedby": "unit", oninput: (event) => { edit.text = event.target.value; } }),
    unit && h("span", { id: "unit", class: "quiet" }, unit),
    h("button", { key: "save", disabled: edit.busy }, "Save"),
    "next" in one || one.origin !== "default" ? h("button", { key: "default", type: "button", class: "plain", disabled: edit.busy, onclick: () => put(one.key, null) }, "Back to the default") : null,
    h("button", { key: "cancel", type: "button", class: "plain", onclick: endEdit }, "Cancel"),
    edit.error && h("p", { class: "trouble", role: "alert" }, edit.error.message, " ", h("span", { class: "quiet" }, edit.error.hint)));
}

function endEdit() {
  edit.key = "";
  redraw();
}

function save(one) {
  const { choices, read } = WORDS[one.key];
  const chosen = choices?.find(([each]) => String(each) === edit.text);
  const value = chosen ? chosen[0] : read ? read(edit.text) : edit.text.trim();
  if (typeof value === "number" && !Number.isFinite(value)) {
    edit.error = { message: "This is not a number.", hint: "" };
    return redraw();
  }
  return put(one.key, one.key === "cache.quota_bytes" && value === "0" ? 0 : value);
}

/** Write it into the file; null takes it out. */
async function put(key, value) {
  edit.busy = true;
  edit.error = null;
  redraw();
  try {
    found = await (await call("PATCH", "/fleet/v1/settings", { key, value })).json();
    edit.key = "";
    say("Saved.");
  } catch (error) {
    edit.error = error;
  }
  edit.busy = false;
  redraw();
}
