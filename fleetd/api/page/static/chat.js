// A chat with a model of the fleet, and a look at what smart prefill keeps of a prompt.

import { call, events, post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { machines, short } from "/page/fleet.js";
import { redraw, say, state } from "/page/store.js";
import { count, counted, rate, seconds } from "/page/units.js";

const SELECTION_MS = 600_000;
// schema: what answers follow, as text; "" leaves them free. wrong: why it is no schema.
const chat = { turns: [], model: "", smart: false, schema: "", wrong: "", abort: null, draft: "" };

function begin(event) {
  event.preventDefault();
  if (chat.abort || !chat.draft.trim()) return;
  chat.wrong = noSchema(chat.schema);
  if (chat.wrong) {
    redraw();
    document.getElementById("form").open = true;
    document.getElementById("schema").focus();
    return;
  }
  const text = chat.draft;
  chat.draft = "";
  send(text);
}

async function send(text) {
  const abort = (chat.abort = new AbortController());
  const asked = { role: "user", content: text, selection: null };
  const turn = { role: "assistant", content: "", reasoning: "", began: performance.now(), first: null, error: null, stopped: false, request: "", plan: "", exactness: "", usage: null };
  chat.turns.push(asked, turn);
  redraw();
  try {
    const messages = chat.turns.filter((one) => one !== turn && (one.content || one.role === "user")).map(({ role, content }) => ({ role, content }));
    const body = { model: chat.model || "default", messages, stream: true, stream_options: { include_usage: true }, ...(chat.smart ? { smart_prefill: true } : {}), ...(chat.schema.trim() ? { json_schema: chat.schema } : {}) };
    const response = await call("POST", "/v1/chat/completions", body, { signal: abort.signal });
    turn.request = response.headers.get("X-Fleet-Request") ?? "";
    turn.plan = response.headers.get("X-Fleet-Plan") ?? "";
    turn.exactness = response.headers.get("X-Fleet-Exactness") ?? "";
    for await (const chunk of events(response)) {
      const delta = chunk.choices?.[0]?.delta ?? {};
      if ((delta.content || delta.reasoning_content) && turn.first === null) turn.first = performance.now();
      turn.content += delta.content ?? "";
      turn.reasoning += delta.reasoning_content ?? "";
      if (chunk.usage) turn.usage = chunk.usage;
      redraw();
    }
    say("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = error;
  }
  turn.ended = performance.now();
  chat.abort = null;
  redraw();
}

/** Why a text is no JSON schema; "" if it is one, or empty. It is sent as it was typed: a parsed one could have other numbers and another order. */
function noSchema(text) {
  if (!text.trim()) return "";
  try {
    const schema = JSON.parse(text);
    return schema !== null && typeof schema === "object" && !Array.isArray(schema) ? "" : "A schema is an object: it begins with { and ends with }.";
  } catch (error) {
    return `This is not valid JSON: ${error.message}.`;
  }
}

function schemaTyped(event) {
  chat.schema = event.target.value;
  if (chat.wrong) chat.wrong = noSchema(chat.schema);
  redraw();
}

function stop() {
  chat.abort?.abort();
  say("Stopped.");
}

async function look(turn) {
  turn.selection = { waiting: true };
  redraw();
  const abort = AbortSignal.timeout(SELECTION_MS);
  try {
    turn.selection = await post("/v1/compress", { messages: [{ role: "user", content: turn.content }] }, { signal: abort });
  } catch (error) {
    turn.selection = { error };
  }
  redraw();
}

export function chatView() {
  return h("div", { class: "chat" },
    h("div", { class: "turns" },
      chat.turns.length ? chat.turns.map((turn, at) => h("article", { key: at, class: turn.role, "aria-label": turn.role === "user" ? "You" : "Answer" }, turn.role === "user" ? question(turn) : reply(turn)))
        : h("p", { class: "quiet" }, "Nothing is kept: neither here, once this tab is closed, nor by the daemon.")),
    h("form", { class: "ask", onsubmit: begin },
      h("label", { for: "prompt", class: "unseen" }, "Your message"),
      h("textarea", { id: "prompt", rows: 3, value: chat.draft, placeholder: "Ask something", oninput: (event) => { chat.draft = event.target.value; }, onkeydown: keyed }),
      h("div", { class: "controls" },
        h("label", null, "Model ", h("select", { value: chat.model, onchange: (event) => { chat.model = event.target.value; } },
          h("option", { value: "" }, `default (${short(state.status.default_model)})`), known().map((name) => h("option", { key: name, value: name }, short(name))))),
        h("label", null, h("input", { type: "checkbox", checked: chat.smart, onchange: (event) => { chat.smart = event.target.checked; } }), " smart prefill"),
        h("span", { class: "grow" }),
        chat.turns.length > 0 && !chat.abort && h("button", { key: "new", type: "button", class: "plain", onclick: () => { chat.turns = []; chat.schema = chat.wrong = ""; redraw(); } }, "New chat"),
        chat.abort ? h("button", { key: "stop", type: "button", class: "danger", onclick: stop }, "Stop") : h("button", { key: "send" }, "Send")),
      h("details", { id: "form" },
        h("summary", null, "Answer as JSON schema", chat.schema.trim() && ": in use"),
        h("label", { for: "schema", class: "unseen" }, "JSON schema"),
        h("textarea", { id: "schema", rows: 4, spellcheck: "false", value: chat.schema, placeholder: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}', "aria-invalid": chat.wrong ? "true" : null, "aria-describedby": "wrong", oninput: schemaTyped }),
        h("p", { id: "wrong", class: "trouble", role: "alert" }, chat.wrong))));
}

function keyed(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) begin(event);
}

function known() {
  return [...new Set(machines().filter((machine) => machine.state === "usable").flatMap((machine) => (machine.models ?? []).filter((model) => !model.part_last && (model.roles ?? ["chat"]).includes("chat")).map((model) => model.name)))].sort();
}

function question(turn) {
  const { selection } = turn;
  return [
    selection?.kept ? marked(turn.content, selection) : h("div", { class: "text" }, turn.content),
    h("p", { class: "quiet" }, selection === null && h("button", { class: "plain small", onclick: () => look(turn) }, "Look at what smart prefill would keep"),
      selection?.waiting && "Scoring …",
      selection?.error && h("span", { class: "why" }, selection.error.message, " ", selection.error.hint),
      selection?.usage && (selection.declined ? `It would be read whole: ${selection.declined}.`
        : `Kept ${count(selection.usage.compressed_tokens)} of ${counted(selection.usage.original_tokens, "token")}, as scored by ${selection.model} in ${seconds(selection.timings.score_ms / 1000)}.`)),
  ];
}

/** A text with what is kept and what is dropped marked; ranges count code points. */
function marked(text, selection) {
  const points = Array.from(text);
  const spans = selection.declined ? [[0, points.length]] : (selection.kept.find((one) => one.index === 0)?.spans ?? []);
  const parts = [];
  let at = 0;
  for (const [first, end] of spans) {
    if (first > at) parts.push(h("del", null, points.slice(at, first).join("")));
    parts.push(h("mark", null, points.slice(first, end).join("")));
    at = end;
  }
  if (at < points.length) parts.push(h("del", null, points.slice(at).join("")));
  return h("div", { class: "text selection", tabindex: "0", role: "region", "aria-label": "The prompt; struck parts would be dropped" }, parts);
}

function reply(turn) {
  const first_s = turn.first === null ? null : (turn.first - turn.began) / 1000;
  const tokens = turn.usage?.completion_tokens;
  const live = [...state.requests.values()].find((request) => turn.request && request.id.startsWith(turn.request));
  return [
    turn.reasoning && h("details", null, h("summary", null, "Reasoning"), h("div", { class: "text quiet" }, turn.reasoning)),
    h("div", { class: "text" }, turn.content),
    turn.error && h("p", { class: "trouble", role: "alert" }, turn.error.message, " ", h("span", { class: "quiet" }, turn.error.hint)),
    h("p", { class: "quiet" },
      turn.ended === undefined && turn.first === null && (live?.stage ? `${live.stage}${live.total ? `: ${count(live.done)} of ${count(live.total)}` : ""} ` : "Waiting … "),
      [turn.stopped && "stopped", first_s !== null && `first token ${seconds(first_s)}`, tokens && counted(tokens, "token"), tokens && turn.ended && rate(tokens - 1, (turn.ended - turn.first) / 1000),
        turn.plan && turn.first !== null && turn.plan.replace("; nodes=", " on ").replaceAll(",", " + "), turn.exactness && turn.first !== null && turn.exactness].filter(Boolean).join(" · "),
      turn.request && turn.ended !== undefined && [" · ", h("a", { href: `#requests/${encodeURIComponent(turn.request)}` }, "why it took as long")]),
  ];
}
