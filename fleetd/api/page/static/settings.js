// The settings that the daemon runs with, each with its line of help. They are changed in its file.

import { get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { redraw } from "/page/store.js";

// What people look for first.
const FIRST = ["models.default", "models.large", "models.small", "engine.memory_fraction", "engine.max_memory_bytes", "engine.idle_unload_s",
  "fleet.name", "fleet.local_only", "smart_prefill.mode", "speculation.mode", "speculation.draft_model", "power.keep_awake", "http.listen"];
let settings = null;
let trouble = null;

async function refresh() {
  try {
    ({ settings } = await get("/fleet/v1/settings"));
    trouble = null;
  } catch (error) {
    trouble = error;
  }
  redraw();
}

export function settingsView() {
  if (settings === null) {
    if (!trouble) refresh();
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: () => { trouble = null; refresh(); } }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the settings …");
  }
  const matter = settings.filter((one) => FIRST.includes(one.key) || one.origin !== "default");
  const others = settings.filter((one) => !matter.includes(one));
  return [
    h("p", { class: "quiet" }, "They are read when the daemon starts. Change them in ", h("code", null, "fleetd.toml"), " in its home, or by the variable that is named."),
    list(matter),
    h("details", null, h("summary", null, `${others.length} others, all as they come`), list(others)),
  ];
}

function list(some) {
  return h("dl", { class: "settings" }, some.map((one) => h("div", { key: one.key, class: one.origin === "default" ? null : "changed" },
    h("dt", null, h("code", null, one.key)),
    h("dd", null, h("b", null, shown(one.value)), one.origin !== "default" && h("span", { class: "quiet" }, ` from ${one.origin}; else ${shown(one.default)}`),
      h("p", null, words(one.why)), h("p", { class: "quiet" }, h("code", null, one.env))))));
}

// Names of things stand between backticks.
function words(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));
}

function shown(value) {
  if (value === "" || (Array.isArray(value) && !value.length)) return "none";
  return Array.isArray(value) ? value.join(", ") : value === true ? "on" : value === false ? "off" : String(value);
}
