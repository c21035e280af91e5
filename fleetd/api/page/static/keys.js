// The keyboard: one letter goes to a view, another to the filter, and "?" shows the map.

import { h } from "/page/dom.js";
import { redraw, state } from "/page/store.js";

const GO = { f: "fleet", r: "requests", h: "history", m: "models", c: "chat", p: "pairing", l: "clients", s: "settings" };
const GO_MS = 1500;
const OFF = "fleetd-keys-off";
let open = false;
let goes = 0;

export function showKeys(wanted) {
  open = wanted;
  redraw();
}

export function listenToKeys() {
  addEventListener("keydown", pressed);
}

// Letters belong to the field that has the focus, and to the browser's own shortcuts.
function pressed(event) {
  const { key, target } = event;
  if (state.link === "login" || open || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (target.closest?.("input, textarea, select, dialog")) {
    if (key === "Escape" && target.matches("[data-filter]")) target.blur();
    return;
  }
  if (key !== "?" && localStorage.getItem(OFF)) return;
  if (act(key)) event.preventDefault();
}

/** Whether the key meant something. */
function act(key) {
  const going = performance.now() - goes < GO_MS;
  goes = 0;
  if (going && Object.hasOwn(GO, key)) location.hash = GO[key];
  else if (key === "g") goes = performance.now();
  else if (key === "?") showKeys(true);
  else if (key === "/") return focus("[data-filter], #prompt");
  else if (key === "j" || key === "k") return step(key === "j" ? 1 : -1);
  else if (key === "Escape" && location.hash.startsWith("#requests/")) back();
  else return false;
  return true;
}

function focus(selector) {
  const found = document.querySelector(selector);
  found?.focus();
  return found !== null;
}

/** The next row of a list: Enter then follows its link. */
function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")].filter((one) => one.offsetParent !== null);
  if (!rows.length) return false;
  const at = rows.indexOf(document.activeElement);
  rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, at + by))].focus();
  return true;
}

// The row that was left is where one goes on.
let left = "";

function back() {
  left = location.hash;
  location.hash = "requests";
}

/** Where the keyboard goes on in a view that has just been drawn. */
export function landing() {
  const row = left && document.querySelector(`[data-row][href="${CSS.escape(left)}"]`);
  left = "";
  return row || document.getElementById("main");
}

const MAP = [
  ["?", "this list"], ["g then f", "Fleet"], ["g then r", "Requests"], ["g then h", "History"], ["g then m", "Models"], ["g then c", "Chat"],
  ["g then p", "Pairing"], ["g then l", "Clients"], ["g then s", "Settings"], ["/", "the filter, or your message"], ["j and k", "the next and the previous request"],
  ["Enter", "open it; in a chat, send"], ["Shift Enter", "a new line in a chat"], ["Esc", "back to the list"],
];

export function keysDialog() {
  if (!open) return null;
  return h("dialog", { key: "keys", class: "keys", "aria-labelledby": "keys", made: (element) => requestAnimationFrame(() => element.isConnected && element.showModal()), onclose: () => showKeys(false) },
    h("h2", { id: "keys" }, "Keyboard"),
    h("dl", null, MAP.map(([key, what]) => h("div", { key }, h("dt", null, key.split(" ").map((part) => (part === "then" || part === "and" ? ` ${part} ` : h("kbd", null, part)))), h("dd", null, what)))),
    h("p", null, h("label", null, h("input", { type: "checkbox", checked: !localStorage.getItem(OFF), onchange: turned }), " Single letters do this")),
    h("button", { onclick: () => showKeys(false) }, "Close"));
}

function turned(event) {
  if (event.target.checked) localStorage.removeItem(OFF);
  else localStorage.setItem(OFF, "1");
}
