// The daemon's list of models: what is here and what could be. Views that show it share it.

import { get } from "/page/calls.js";
import { onChange, redraw } from "/page/store.js";

/** `listing` is null until it has come; `trouble` is why it has not. */
export const models = { listing: null, trouble: null };
let fetching = false;

export async function refresh() {
  if (fetching) return;
  fetching = true;
  try {
    models.listing = await get("/fleet/v1/models");
    models.trouble = null;
  } catch (error) {
    models.trouble = error;
  }
  fetching = false;
  redraw();
}

/** The same of another machine, by its id; `on` is "" while only this machine's models are looked at. */
export const there = { on: "", listing: null, trouble: null };

/** Look at the models of another machine, or again at those of this one with "". */
export async function lookAt(on) {
  if (on !== there.on) Object.assign(there, { on, listing: null, trouble: null });
  redraw();
  if (!on) return refresh();
  let found;
  try {
    found = { listing: await get(`/fleet/v1/models?on=${encodeURIComponent(on)}`), trouble: null };
  } catch (error) {
    found = { trouble: error };
  }
  // People have turned to another machine since.
  if (there.on === on) Object.assign(there, found);
  return redraw();
}

let theirs = "";
onChange((change) => {
  const peer = change.peers?.[there.on];
  if (!there.on || !peer) return;
  // Pulled, loaded or removed, by any program.
  const now = peer.models.map((model) => `${model.name} ${model.state}`).join();
  if (now !== theirs && there.listing !== null) lookAt(there.on);
  theirs = now;
});

let engines = "";
onChange((change) => {
  if (!change.status) return;
  // Loaded or unloaded, by any program: what fits has changed.
  const now = change.status.engines.map((engine) => `${engine.model} ${engine.state}`).join();
  if (now !== engines && models.listing !== null) refresh();
  engines = now;
});
