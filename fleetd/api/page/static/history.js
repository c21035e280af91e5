// Hours or days: how long the first token took, how fast tokens came, and what was saved.

import { get } from "/page/calls.js";
import { h } from "/page/dom.js";
import { redraw, state } from "/page/store.js";
import { count, day, none, seconds, speed } from "/page/units.js";

const DAYS = 30;
// With fewer days of requests than this, hours are shown.
const FEW_DAYS = 3;
const LEAST_HOURS = 8;
const STALE_MS = 30_000;
let usage = null;
let trouble = null;
let fetched = 0;
/** The place that a pointer or the keyboard has chosen in all charts; null: none. */
let cursor = null;

async function refresh() {
  fetched = Date.now();
  try {
    const byDay = await get(`/fleet/v1/usage?days=${DAYS}`);
    const few = new Set(byDay.rows.map((row) => row.day)).size < FEW_DAYS;
    usage = few ? { ...(await get(`/fleet/v1/usage?days=${FEW_DAYS}&by=hour`)), hours: true } : byDay;
    trouble = null;
  } catch (error) {
    trouble = error;
  }
  redraw();
}

const FIELDS = ["requests", "failed", "shared", "completion_tokens", "cached_tokens", "prefill_s", "decode_s", "saved_s", "drafts_s", "smart_s"];

/** One entry per name, in that order: sums over models and machines, with medians. */
export function spans(report, names) {
  const found = new Map(names.map((name) => [name, { name, read: 0, ...Object.fromEntries(FIELDS.map((field) => [field, 0])) }]));
  for (const row of report.rows) {
    const one = found.get(row.day);
    if (!one) continue;
    one.read += row.prompt_tokens - row.cached_tokens;
    for (const field of FIELDS) one[field] += row[field];
  }
  const first = new Map((report.first_token ?? []).map((one) => [one.day, one]));
  return [...found.values()].map((one) => ({ ...one,
    p50_s: first.get(one.name)?.p50_s ?? null, p90_s: first.get(one.name)?.p90_s ?? null,
    read_tok_s: one.prefill_s > 0 ? one.read / one.prefill_s : null, written_tok_s: one.decode_s > 0 ? one.completion_tokens / one.decode_s : null,
    helped_s: one.saved_s - one.drafts_s - one.smart_s }));
}

/** "2026-01-31" of the last days or "2026-01-31 14:00" of the hours since the first in use, oldest first. */
function names({ hours, rows }, now) {
  const first = rows.length ? rows[rows.length - 1].day : "";
  const found = [];
  for (let back = 0; back < (hours ? FEW_DAYS * 24 : DAYS); back++) {
    const then = hours ? new Date(now.getTime() - back * 3_600_000) : new Date(now.getFullYear(), now.getMonth(), now.getDate() - back);
    found.unshift(hours ? `${day(then)} ${String(then.getHours()).padStart(2, "0")}:00` : day(then));
    if (hours && found[0] <= first && found.length >= LEAST_HOURS) break;
  }
  return found;
}

export function historyView() {
  if (Date.now() - fetched > STALE_MS && state.link === "live") refresh();
  if (usage === null) {
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: refresh }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the figures …");
  }
  const all = spans(usage, names(usage, new Date()));
  const used = all.filter((one) => one.requests);
  if (!used.length) return h("p", { class: "quiet" }, `No request in the last ${usage.hours ? FEW_DAYS : DAYS} days.`);
  const each = usage.hours ? "an hour" : "a day";
  return [
    h("div", { class: "charts" }, CHARTS.map((one) => chart(all, one, each))),
    h("p", { class: "quiet" }, "Saved by other machines: what this machine alone was expected to take, less what it took. Saved by drafts and by smart prefill: their own estimates. What was not read again is told in tokens: its time was not measured."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": usage.hours ? "Figures by hour" : "Figures by day" },
      h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, usage.hours ? "Hour" : "Day"), COLUMNS.map(([name]) => h("th", { scope: "col", class: "number", key: name }, name)))),
        h("tbody", null, [...used].reverse().map((one) => h("tr", { key: one.name },
          h("th", { scope: "row" }, one.name), COLUMNS.map(([name, text]) => h("td", { class: "number", key: name }, text(one)))))))),
  ];
}

const COLUMNS = [
  ["Requests", (one) => count(one.requests)], ["Failed", (one) => (one.failed ? count(one.failed) : none)], ["Read together", (one) => (one.shared ? count(one.shared) : none)],
  ["First token, median", (one) => seconds(one.p50_s)], ["9 of 10 within", (one) => seconds(one.p90_s)], ["Reads", (one) => speed(one.read_tok_s)], ["Writes", (one) => speed(one.written_tok_s)],
  ["Saved", (one) => (one.saved_s ? seconds(one.saved_s) : none)], ["Tokens read", (one) => count(one.read)], ["Not read again", (one) => count(one.cached_tokens)], ["Tokens written", (one) => count(one.completion_tokens)],
];

// ---- Charts ----------------------------------------------------------------------------------------------

/** `bars`: what is stacked in a column, from the bottom up; `mark`: a figure above it. Each is a text with "*" for
 * the value, a field, and how it is drawn. */
const CHARTS = [
  { title: "First token", unit: seconds, bars: [["median *", "p50_s", "fill"]], mark: ["9 of 10 within *", "p90_s"] },
  { title: "Prompt tokens read", unit: speed, bars: [["* while reading", "read_tok_s", "fill"]] },
  { title: "Tokens written", unit: speed, bars: [["* while writing", "written_tok_s", "fill"]] },
  { title: "Time saved", unit: seconds, bars: [["* by other machines", "helped_s", "lane2"], ["* by drafts", "drafts_s", "lane1"], ["* by smart prefill", "smart_s", "lane3"]] },
  { title: "Not read again", unit: (value) => `${count(value)} tokens`, bars: [["* from caches", "cached_tokens", "fill"]] },
  { title: "Requests", unit: count, bars: [["*", "requests", "fill"]] },
];
const WIDTH = 300;
const HEIGHT = 72;

function chart(all, { title, unit, bars, mark }, each) {
  const value = (one, field) => one[field] ?? 0;
  const total = (one, sign) => bars.reduce((sum, [, field]) => sum + Math.max(0, sign * value(one, field)), 0);
  const known = Math.max(...all.map((one) => Math.max(total(one, 1), mark ? value(one, mark[1]) : 0)));
  const top = known || 1;
  const bottom = -Math.max(...all.map((one) => total(one, -1)), 0);
  const y = (height) => ((top - height) / (top - bottom)) * HEIGHT;
  const last = all.findLastIndex((one) => one.requests);
  const at = cursor !== null && cursor < all.length ? cursor : last;
  const read = (one) => [...bars, ...(mark ? [mark] : [])].filter(([, field]) => one[field] !== null && (bars.length === 1 || one[field])).map(([text, field]) => text.replace("*", unit(one[field]))).join(", ") || none;
  const step = WIDTH / all.length;
  return h("figure", { key: title },
    h("figcaption", null, h("b", null, title), h("span", { class: "most" }, known ? `up to ${unit(known)}` : ""), h("span", { class: "reading" }, `${label(all[at].name)}: ${read(all[at])}`)),
    h("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${title} ${each}`, "aria-valuemin": 0, "aria-valuemax": all.length - 1, "aria-valuenow": at, "aria-valuetext": `${all[at].name}: ${read(all[at])}`,
      onpointermove: (event) => moveTo(Math.floor((all.length * (event.clientX - event.currentTarget.getBoundingClientRect().left)) / event.currentTarget.clientWidth), all.length), onpointerleave: () => moveTo(null),
      onkeydown: (event) => stepped(event, at, all.length) },
      h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
        h("line", { class: "zero", x1: 0, x2: WIDTH, y1: 0.5, y2: 0.5 }),
        h("line", { class: "zero", x1: 0, x2: WIDTH, y1: y(0).toFixed(1), y2: y(0).toFixed(1) }),
        cursor === at && h("rect", { class: "here", x: (at * step).toFixed(1), width: step.toFixed(1), y: 0, height: HEIGHT }),
        all.map((one, place) => column(one, place, bars, mark, { step, y })))),
    h("p", { class: "ends quiet" }, h("span", null, label(all[0].name)), h("span", null, label(all[Math.floor(all.length / 2)].name)), h("span", null, label(all[all.length - 1].name))),
    bars.length > 1 && h("ul", { class: "legend" }, bars.map(([text, , kind]) => h("li", { key: text }, h("span", { class: `swatch ${kind}` }), text.replace("* ", "")))));
}

function column(one, place, bars, mark, { step, y }) {
  const x = (place * step + 1).toFixed(1);
  const width = Math.max(1, step - 2).toFixed(1);
  let up = 0;
  let down = 0;
  const found = bars.map(([text, field, kind]) => {
    const size = one[field] ?? 0;
    if (!size) return null;
    const from = size > 0 ? up : down;
    if (size > 0) up += size;
    else down += size;
    const [high, low] = [y(Math.max(from, from + size)), y(Math.min(from, from + size))];
    return h("rect", { key: `${place} ${text}`, class: size < 0 ? "less" : kind, x, width, y: high.toFixed(1), height: Math.max(1, low - high).toFixed(1) });
  });
  const marked = mark && one[mark[1]] !== null && h("line", { key: `${place} mark`, class: "mark90", x1: x, x2: (place * step + step - 1).toFixed(1), y1: y(one[mark[1]]).toFixed(1), y2: y(one[mark[1]]).toFixed(1) });
  return [found, marked];
}

/** "10-28" or "14:00": what is the same everywhere is left out. */
function label(name) {
  return name.length > 10 ? name.slice(11) : name.slice(5);
}

function moveTo(place, number = 0) {
  const wanted = place === null ? null : Math.max(0, Math.min(number - 1, place));
  if (wanted === cursor) return;
  cursor = wanted;
  redraw();
}

// `shown` is what was drawn last: of keys that come faster than drawings, each goes on from the one before.
function stepped(event, shown, number) {
  const at = cursor ?? shown;
  const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: number - 1 };
  if (!Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  moveTo(moves[event.key], number);
}
