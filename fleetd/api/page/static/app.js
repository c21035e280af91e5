// The frame around the views: where we are, whether the daemon answers, and which view is shown.

import { session } from "/page/calls.js";
import { h, patch } from "/page/dom.js";
import { isTicket, loginView, logout, redeem } from "/page/login.js";
import { keysDialog, landing, listenToKeys, showKeys } from "/page/keys.js";
import { connect, drawWith, hereName, onChange, redraw, say, state } from "/page/store.js";
import { chatView } from "/page/chat.js";
import { clientsView } from "/page/clients.js";
import { fleetView } from "/page/fleet.js";
import { historyView } from "/page/history.js";
import { modelsView } from "/page/models.js";
import { pairingView } from "/page/pairing.js";
import { requestsView } from "/page/requests.js";
import { settingsView } from "/page/settings.js";
import { stateWord } from "/page/units.js";

const VIEWS = {
  fleet: ["Fleet", fleetView],
  requests: ["Requests", requestsView],
  history: ["History", historyView],
  models: ["Models", modelsView],
  chat: ["Chat", chatView],
  pairing: ["Pairing", pairingView],
  clients: ["Clients", clientsView],
  settings: ["Settings", settingsView],
};
// The first view of a group is where its link leads.
const GROUPS = {
  Fleet: ["fleet"], Requests: ["requests", "history"], Models: ["models"], Chat: ["chat"], Setup: ["pairing", "clients", "settings"],
};
const root = document.getElementById("app");
let shown = "";

/** ["requests", "chatcmpl-1"] for #requests/chatcmpl-1 */
function place() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return [Object.hasOwn(VIEWS, name) ? name : "fleet", decodeURIComponent(rest.join("/"))];
}

function draw() {
  if (state.link === "login") {
    document.title = "fleetd";
    return patch(root, loginView());
  }
  // The frame comes with what is in it: nothing has to make room for the machine's name afterwards.
  if (state.status === null && state.link === "connecting") return undefined;
  const [name, rest] = place();
  const [title, view] = VIEWS[name];
  const machine = hereName();
  document.title = machine ? `${title} · ${machine}` : title;
  patch(root, [
    h("header", { class: "top" },
      h("p", { class: "mark" }, h("b", null, "fleetd"), " ", h("span", { class: "quiet" }, machine)),
      h("nav", { "aria-label": "Views" }, Object.entries(GROUPS).map(([group, views]) =>
        h("a", { key: group, href: `#${views[0]}`, "aria-current": views.includes(name) ? (name === views[0] ? "page" : "true") : null }, group))),
      h("p", { class: `link ${state.link}` }, linkWord()),
      h("button", { class: "aside", title: "Keyboard (?)", "aria-label": "Keyboard", onclick: () => showKeys(true) }, "?"),
      h("button", { class: "aside", onclick: logout }, "Log out"),
    ),
    h("p", { class: "banner", hidden: !banner() }, banner()),
    h("main", { id: "main", key: name, tabindex: "-1", class: `view-${name}` },
      inside(name),
      h("h1", { class: name === "models" ? null : "unseen" }, title),
      state.status === null ? h("p", { class: "quiet" }, "Waiting for the daemon …") : view(rest)),
    keysDialog(),
  ]);
  return undefined;
}

/** Links between the views of one group. */
function inside(name) {
  const [group, views] = Object.entries(GROUPS).find(([, each]) => each.includes(name));
  return views.length > 1 && h("nav", { class: "sub", "aria-label": group }, views.map((each) =>
    h("a", { key: each, href: `#${each}`, "aria-current": each === name ? "page" : null }, VIEWS[each][0])));
}

function linkWord() {
  return { live: "live", offline: "no answer", connecting: "connecting" }[state.link];
}

function banner() {
  if (state.link === "offline" && state.status) {
    const at = new Date(state.heard).toLocaleTimeString("en-GB");
    return `The daemon does not answer. Below is what it told last, at ${at}. The page goes on by itself.`;
  }
  if (state.status?.draining) return "The daemon is stopping. It takes no new requests.";
  return "";
}

async function moved() {
  if (isTicket()) {
    await redeem();
    connect();
  }
  const at = location.hash;
  redraw();
  if (at === shown) return;
  const first = shown === "";
  shown = at;
  // Who uses a keyboard or a screen reader goes on at the new view.
  if (!first) {
    requestAnimationFrame(() => {
      const at = landing();
      at?.focus({ preventScroll: at.id === "main" });
      if (at?.id === "main") scrollTo(0, 0);
    });
  }
}

onChange((change) => {
  for (const [id, peer] of Object.entries(change.peers ?? {})) {
    const before = state.peers.get(id);
    if (before && peer && before.state !== peer.state) say(`${peer.name} is ${stateWord(peer.state)}.`);
  }
});
addEventListener("hashchange", moved);
session.onchange(connect);
listenToKeys();
drawWith(draw);
await redeem();
shown = location.hash;
connect();
