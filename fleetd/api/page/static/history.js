// Days: how long the first token took, how fast tokens came, and what was saved.

import { get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { redraw, state } from "/page/store.js";
import { count, day, none, seconds, speed } from "/page/units.js";

const DAYS = 30;
const STALE_MS = 30_000;
let usage = null;
let trouble = null;
let fetched = 0;

async function refresh() {
  fetched = Date.now();
  try {
    usage = await get(`/fleet/v1/usage?days=${DAYS}`);
    trouble = null;
  } catch (error) {
    trouble = error;
  }
  redraw();
}

/** One entry per day of the last `DAYS`, oldest first. */
export function days(rows, now) {
  const found = new Map();
  for (let back = DAYS - 1; back >= 0; back--) {
    const name = day(new Date(now.getFullYear(), now.getMonth(), now.getDate() - back));
    found.set(name, { day: name, requests: 0, failed: 0, read: 0, read_s: 0, written: 0, written_s: 0, first: 0, first_s: 0, saved_s: 0 });
  }
  for (const row of rows) {
    const one = found.get(row.day);
    if (!one) continue;
    one.requests += row.requests;
    one.failed += row.failed;
    one.read += row.prompt_tokens - row.cached_tokens;
    one.read_s += row.prefill_s;
    one.written += row.completion_tokens;
    one.written_s += row.decode_s;
    one.first += row.first_tokens;
    one.first_s += row.first_s;
    one.saved_s += row.saved_s;
  }
  return [...found.values()].map((one) => ({ ...one, ttft_s: one.first > 0 ? one.first_s / one.first : null,
    read_tok_s: one.read_s > 0 ? one.read / one.read_s : null, written_tok_s: one.written_s > 0 ? one.written / one.written_s : null,
    saved_s: one.requests > 0 ? one.saved_s : null }));
}

export function historyView() {
  if (Date.now() - fetched > STALE_MS && state.link === "live") refresh();
  if (usage === null) {
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: refresh }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the figures …");
  }
  const all = days(usage.rows, new Date());
  const used = all.filter((one) => one.requests);
  if (!used.length) return h("p", { class: "quiet" }, `No request in the last ${DAYS} days.`);
  return [
    h("div", { class: "charts" },
      chart(all, "First token", "ttft_s", seconds, "mean of a day"),
      chart(all, "Prompt tokens read", "read_tok_s", speed, "while reading"),
      chart(all, "Tokens written", "written_tok_s", speed, "while writing"),
      chart(all, "Time saved", "saved_s", seconds, "a day, as estimated"),
      chart(all, "Requests", "requests", count, "a day")),
    h("p", { class: "quiet" }, "Saved is what this machine alone was expected to take, less what it took, and what drafts saved."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Figures by day" },
      h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Day"),
          ["Requests", "Failed", "First token", "Reads", "Writes", "Saved", "Tokens read", "Tokens written"].map((name) => h("th", { scope: "col", class: "number", key: name }, name)))),
        h("tbody", null, [...used].reverse().map((one) => h("tr", { key: one.day },
          h("th", { scope: "row" }, one.day),
          [count(one.requests), one.failed ? count(one.failed) : none, seconds(one.ttft_s), speed(one.read_tok_s), speed(one.written_tok_s), seconds(one.saved_s), count(one.read), count(one.written)]
            .map((text, at) => h("td", { class: "number", key: at }, text))))))),
  ];
}

const WIDTH = 300;
const HEIGHT = 64;

function chart(all, title, field, unit, more) {
  const values = all.map((one) => one[field]);
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, 0) || 1;
  const bottom = Math.min(...known, 0);
  const y = (value) => 4 + ((top - value) / (top - bottom)) * (HEIGHT - 8);
  const last = known.length ? known[known.length - 1] : null;
  const step = WIDTH / all.length;
  return h("figure", null,
    h("figcaption", null, title, h("br"), h("b", null, unit(last)), " ", h("small", null, more)),
    h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, last ${unit(last)}, at most ${unit(Math.max(...known))}. The table below has every day.`, preserveAspectRatio: "none" },
      h("line", { class: "zero", x1: 0, x2: WIDTH, y1: y(0).toFixed(1), y2: y(0).toFixed(1) }),
      all.map((one, at) => one[field] === null ? null : h("rect", { key: one.day, class: one[field] < 0 ? "less" : "fill", x: (at * step + 1).toFixed(1), width: (step - 2).toFixed(1),
        y: Math.min(y(one[field]), y(0)).toFixed(1), height: Math.max(one[field] ? 1 : 0, Math.abs(y(0) - y(one[field]))).toFixed(1) },
        h("title", null, `${one.day}: ${unit(one[field])}`)))),
    h("p", { class: "ends quiet" }, h("span", null, all[0].day.slice(5)), h("span", null, "today")));
}
