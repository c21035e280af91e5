// How much is kept of prompts on this machine's disk.

import { get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { onChange, redraw } from "/page/store.js";
import { memory } from "/page/units.js";

let report = null;
let known = "";

// Prompts are written after they were read; they are forgotten in memory and on the disk together.
onChange(({ full, status }) => {
  if (!status) return;
  const now = status.engines.map((engine) => `${engine.disk_written_bytes} ${engine.prefix_bytes}`).join();
  if (!full && now === known) return;
  known = now;
  refresh();
});

async function refresh() {
  try {
    report = await get("/fleet/v1/cache");
  } catch {
    report = null;
  }
  redraw();
}

/** "kept prompts on disk 1.2 GB" for the legend of a machine's memory; nothing if nothing is there. */
export function keptOnDisk() {
  return report?.n_bytes > 0 && h("li", { key: "disk", title: "Encrypted, on this machine's disk" }, "kept prompts on disk ", h("b", null, memory(report.n_bytes)));
}
