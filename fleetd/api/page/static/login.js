// Logging in with the ticket behind the #, which no server and no log has seen, and logging out.

import { call, post, session } from "/page/calls.js";
import { h } from "/page/dom.js";
import { connect } from "/page/store.js";

const TICKET = "#ticket=";

export const login = { error: null };

/** Trade the ticket of the address bar, if there is one, for a session; it leaves the address bar first. */
export async function redeem() {
  if (!location.hash.startsWith(TICKET)) return;
  const ticket = decodeURIComponent(location.hash.slice(TICKET.length));
  history.replaceState(null, "", "/#fleet");
  login.error = null;
  try {
    const response = await call("POST", "/fleet/v1/page/session", {}, { headers: { "X-Fleet-Ticket": ticket } });
    session.key = (await response.json()).key;
  } catch (error) {
    login.error = error;
    // An older session of this browser goes on.
  }
}

export function isTicket() {
  return location.hash.startsWith(TICKET);
}

export async function logout() {
  try {
    await post("/fleet/v1/page/logout", {});
  } finally {
    session.key = "";
    connect();
  }
}

/** What is shown to who is not logged in. */
export function loginView() {
  return h("main", { id: "main", class: "login", tabindex: "-1" },
    h("h1", null, "The fleet on one page"),
    login.error && h("p", { class: "trouble", role: "alert" }, login.error.message),
    h("p", null, "This page opens with a link that works once, for 30 seconds. On the machine that runs the daemon, type:"),
    h("pre", null, h("code", null, "fleetctl open")),
    h("p", { class: "quiet" }, "A session ends when it is not used for twelve hours, when you log out, and when the daemon stops. ",
      "This tab goes on by itself once the link was opened in this browser."),
  );
}
