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

let engines = "";
onChange((change) => {
  if (!change.status) return;
  // Loaded or unloaded, by any program: what fits has changed.
  const now = change.status.engines.map((engine) => `${engine.model} ${engine.state}`).join();
  if (now !== engines && models.listing !== null) refresh();
  engines = now;
});
