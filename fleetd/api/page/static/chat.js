// A chat with a model of the fleet. Its turns are in this tab alone.

import { call, events } from "/page/calls.js";
import { copyButton } from "/page/clipboard.js";
import { h } from "/page/dom.js";
import { machines, short } from "/page/fleet.js";
import { ACCEPTED, LIMITS, contentOf, imageList, imageType, readImage, readsImages } from "/page/images.js";
import { models, refresh } from "/page/listing.js";
import { markdown } from "/page/markdown.js";
import { closePreview, preview } from "/page/preview.js";
import { setting } from "/page/settings.js";
import { hereName, redraw, say, state } from "/page/store.js";
import { bitsOf, count, counted, rate, seconds } from "/page/units.js";

const FOLDED_LINES = 12;
const FOLDED_CHARS = 1500;
const FILE_BYTES = 2_000_000;
// So near to the end of the page still counts as being there.
const NEAR_PX = 40;
const TROUBLES_SHOWN = 3;
// schema: what answers follow, as text; "" leaves them free. wrong: why it is no schema. troubles: why files were not
// taken. images: those of the next message. reading: files are being read. dropping: some are held over the page.
const chat = { turns: [], model: "", smart: false, local: false, system: "", schema: "", wrong: "", troubles: [], abort: null, draft: "", images: [], reading: false, dropping: false };

// ---- Following the answer --------------------------------------------------------------------------------

// The page goes down with what is written, until somebody goes up; at the end it goes down again.
const follow = { on: true, y: 0 };

function atEnd() {
  const { scrollHeight, clientHeight } = document.scrollingElement;
  return scrollY + clientHeight >= scrollHeight - NEAR_PX;
}

addEventListener("scroll", () => {
  const before = follow.on;
  if (scrollY < follow.y - 1) follow.on = atEnd();
  else if (atEnd()) follow.on = true;
  follow.y = scrollY;
  if (before !== follow.on) redraw();
}, { passive: true });

/** Draw, then show the end of the page if it is followed. */
function grown() {
  redraw();
  requestAnimationFrame(() => {
    if (follow.on && document.querySelector("main.view-chat")) scrollTo(0, document.scrollingElement.scrollHeight);
  });
}

// ---- Asking ----------------------------------------------------------------------------------------------

function begin(event) {
  event.preventDefault();
  if (chat.abort || unsendable() || !(chat.draft.trim() || chat.images.length)) return;
  chat.wrong = noSchema(chat.schema);
  if (chat.wrong) {
    redraw();
    document.getElementById("form").open = true;
    document.getElementById("schema").focus();
    return;
  }
  const { draft, images } = chat;
  Object.assign(chat, { draft: "", images: [], troubles: [] });
  closePreview();
  chat.turns.push({ role: "user", content: draft, images, open: false });
  answer();
}

function bodyOf(turns) {
  const messages = turns.filter((one) => one.content || one.role === "user").map(({ role, content, images = [] }) => ({ role, content: contentOf(content, images) }));
  if (chat.system.trim()) messages.unshift({ role: "system", content: chat.system });
  return { model: chat.model || "default", messages, stream: true, stream_options: { include_usage: true },
    ...(chat.smart ? { smart_prefill: true } : {}), ...(chat.local ? { local_only: true } : {}), ...(chat.schema.trim() ? { json_schema: chat.schema } : {}) };
}

/** Have the last question answered. */
async function answer() {
  const abort = (chat.abort = new AbortController());
  const body = bodyOf(chat.turns);
  const turn = { role: "assistant", content: "", reasoning: "", began: performance.now(), first: null, error: null, stopped: false, request: "", plan: "", exactness: "", kv_bits: 0, wire_bits: 0, smart: "", usage: null };
  chat.turns.push(turn);
  follow.on = true;
  grown();
  try {
    const response = await call("POST", "/v1/chat/completions", body, { signal: abort.signal });
    turn.request = response.headers.get("X-Fleet-Request") ?? "";
    turn.plan = response.headers.get("X-Fleet-Plan") ?? "";
    turn.exactness = response.headers.get("X-Fleet-Exactness") ?? "";
    turn.kv_bits = Number(response.headers.get("X-Fleet-KV-Bits") ?? 0);
    turn.wire_bits = Number(response.headers.get("X-Fleet-Wire-Bits") ?? 0);
    turn.smart = notUsed(response.headers.get("X-SmartPrefill-Skipped") ?? "");
    for await (const chunk of events(response, undefined, (comment) => commented(turn, comment))) {
      heard(turn, chunk);
      grown();
    }
    say("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else turn.error = error;
  }
  turn.ended = performance.now();
  chat.abort = null;
  grown();
}

function heard(turn, chunk) {
  const delta = chunk.choices?.[0]?.delta ?? {};
  if ((delta.content || delta.reasoning_content) && turn.first === null) turn.first = performance.now();
  turn.content += delta.content ?? "";
  turn.reasoning += delta.reasoning_content ?? "";
  if (chunk.usage) turn.usage = chunk.usage;
  const { smart_prefill: smart } = chunk;
  if (smart) turn.smart = smart.skipped ? notUsed(smart.skipped) : `smart prefill: read ${count(smart.compressed_tokens)} of ${counted(smart.original_tokens, "token")}`;
}

// What is known only once the headers are out comes in comments.
function commented(turn, text) {
  const [, name, told] = /^(plan|exactness|kv bits|wire bits|smart prefill skipped:) (.*)$/.exec(text) ?? [];
  if (name === "plan") turn.plan = told.split(": ")[0];
  else if (name === "exactness") turn.exactness = told;
  else if (name?.endsWith(" bits")) turn[name.replace(" ", "_")] = Number(told);
  else if (name) turn.smart = notUsed(told);
  redraw();
}

/** "smart prefill: not used, because the task is about the whole text" for "declined: the task …" */
function notUsed(skipped) {
  return skipped && `smart prefill: not used, because ${skipped.replace(/^[a-z_]+: /, "").replace(/\.$/, "")}`;
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

function retry() {
  chat.turns.pop();
  answer();
}

/** Take a question back into the field, and drop it and what came after it. */
function edit(turn) {
  chat.draft = turn.content;
  chat.images = turn.images;
  chat.turns = chat.turns.slice(0, chat.turns.indexOf(turn));
  redraw();
  document.getElementById("prompt").focus();
}

function newChat() {
  Object.assign(chat, { turns: [], schema: "", wrong: "", troubles: [] });
  redraw();
  document.getElementById("prompt").focus();
}

// ---- Files -----------------------------------------------------------------------------------------------

function modelName() {
  return chat.model || state.status.default_model;
}

/** All images of the chat: each request has them. */
function allImages() {
  return [...chat.turns.flatMap((turn) => turn.images ?? []), ...chat.images];
}

/** Whether there are images, and a model that reads text only was chosen for them. */
function wrongModel() {
  return allImages().length > 0 && readsImages(modelName()) === false;
}

function unsendable() {
  return chat.reading || wrongModel();
}

function leaveImagesOut() {
  for (const one of [chat, ...chat.turns]) one.images = [];
  redraw();
  document.getElementById("prompt").focus();
}

function removeImage(image) {
  chat.images = chat.images.filter((one) => one !== image);
  say(`${image.name} is removed.`);
  redraw();
  document.getElementById("prompt").focus();
}

let taken = Promise.resolve();

/** Add files to the message, one after the other: images beside it, and others as its text. */
function take(files) {
  taken = taken.then(() => takeAll(files));
}

async function takeAll(files) {
  Object.assign(chat, { troubles: [], reading: true });
  redraw();
  const focused = document.activeElement;
  for (const file of files) {
    try {
      const type = await imageType(file);
      // People may type and remove images while a file is read.
      if (type) await attach(file, type);
      else append(await fileText(file));
    } catch (error) {
      chat.troubles.push(`${file.name}: ${error.message}`);
    }
  }
  chat.reading = false;
  if (chat.images.length) say(`${counted(chat.images.length, "image")} attached.`);
  redraw();
  // Who types elsewhere meanwhile goes on there.
  if ([focused, document.body].includes(document.activeElement)) document.getElementById("prompt")?.focus();
}

function append(text) {
  chat.draft = `${chat.draft}${chat.draft ? "\n\n" : ""}${text}\n\n`;
}

async function attach(file, type) {
  const name = modelName();
  const reads = readsImages(name);
  if (!reads) throw new Error(`it is an image, and ${reads === undefined ? `whether ${short(name)} reads images is not known` : `${short(name)} reads text only`}.`);
  const image = await readImage(file, type, allImages());
  chat.images = [...chat.images, image];
}

function filesChosen(event) {
  take([...event.target.files]);
  event.target.value = "";
}

/** The text of a file, with its name above it. Raises Error if it is no text. */
async function fileText(file) {
  if (file.size > FILE_BYTES) throw new Error("it is larger than 2 MB.");
  const bytes = await file.arrayBuffer();
  try {
    return `${file.name}:\n\n${new TextDecoder("utf-8", { fatal: true }).decode(bytes)}`;
  } catch {
    throw new Error("it is no text, and no PNG, JPEG, WebP or GIF.");
  }
}

// Files may be dropped and pasted anywhere: a browser opens a dropped file that is not taken, and the chat is gone.
function whileShown(type, act) {
  addEventListener(type, (event) => document.querySelector("main.view-chat") && act(event));
}

function dropping(wanted) {
  if (chat.dropping === wanted) return;
  chat.dropping = wanted;
  redraw();
}

whileShown("dragover", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "copy";
  dropping(true);
});
// Between two elements there is another one; outside of the page there is none.
whileShown("dragleave", (event) => event.relatedTarget === null && dropping(false));
whileShown("drop", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  dropping(false);
  take([...event.dataTransfer.files]);
});
whileShown("paste", (event) => {
  const { files, types } = event.clipboardData;
  // Cells of a table and words of a document come as text, and as a picture of it as well.
  if (!files.length || (types.includes("text/plain") && types.includes("text/html"))) return;
  event.preventDefault();
  take([...files]);
});

// ---- The view --------------------------------------------------------------------------------------------

export function chatView() {
  if (models.listing === null && models.trouble === null) refresh();
  const last = chat.turns.length - 1;
  return h("div", { class: "chat" },
    h("div", { class: "turns" }, chat.turns.length
      ? chat.turns.map((turn, at) => h("article", { key: at, class: turn.role, "aria-label": turn.role === "user" ? "You" : "Answer" }, turn.role === "user" ? question(turn) : reply(turn, at === last)))
      : empty()),
    h("form", { class: chat.dropping ? "ask dropping" : "ask", onsubmit: begin },
      chat.abort && !follow.on && h("p", { class: "jump" }, h("button", { type: "button", onclick: () => { follow.on = true; grown(); } }, "To the end ↓")),
      h("label", { for: "prompt", class: "unseen" }, "Your message"),
      h("textarea", { id: "prompt", rows: 3, value: chat.draft, placeholder: "Ask something", oninput: (event) => { chat.draft = event.target.value; redraw(); }, onkeydown: keyed }),
      imageList("Images to send", chat.images, removeImage),
      models.listing === null && models.trouble && h("p", { key: "unknown", class: "trouble", role: "alert" }, `Which models read images is not known. ${models.trouble.message} `, h("button", { type: "button", onclick: refresh }, "Try again")),
      chat.troubles.length > 0 && h("div", { key: "troubles", class: "trouble", role: "alert" }, troubles()),
      wrongModel() && h("p", { key: "wrong-model", class: "trouble", role: "alert" }, `${short(modelName())} reads text only, and this chat has ${counted(allImages().length, "image")}. Choose a model that reads images, or `,
        h("button", { type: "button", class: "plain small", onclick: leaveImagesOut }, allImages().length === 1 ? "leave it out" : "leave them out"), "."),
      // Smart prefill leaves prompts with images whole.
      !allImages().length && preview(chat.draft),
      controls(), more()));
}

function empty() {
  const disk = setting("cache.disk");
  return h("div", { class: "quiet nothing" },
    readsImages(modelName()) && h("p", { key: "images" }, `Images can be attached, pasted or dropped: ${LIMITS}`),
    h("p", null, "No text and no image is stored."),
    disk === true && h("p", null, "The model's working state stays encrypted on this disk (", h("a", { href: "#settings" }, h("code", null, "cache.disk")), ")."),
    disk === false && h("p", null, "The model's working state stays in memory until the model is unloaded; nothing of it is written to this disk (", h("a", { href: "#settings" }, h("code", null, "cache.disk")), " is off)."));
}

function controls() {
  const { default_model: usual } = state.status;
  return h("div", { class: "controls" },
    h("label", null, h("span", { class: "unseen" }, "Model"), h("select", { value: chat.model, onchange: (event) => { chat.model = event.target.value; redraw(); } },
      h("option", { value: "" }, `${short(usual)} (${readsImages(usual) ? "default, reads images" : "default"})`),
      known().filter((name) => name !== usual).map((name) => h("option", { key: name, value: name }, `${short(name)}${readsImages(name) ? " (reads images)" : ""}`)))),
    checkbox("smart", "smart prefill"), checkbox("local", "only on this machine"),
    h("span", { class: "grow" }),
    chat.turns.length > 0 && !chat.abort && h("button", { key: "new", type: "button", class: "plain", onclick: newChat }, "New chat"),
    chat.abort ? h("button", { key: "stop", type: "button", class: "danger", onclick: stop }, "Stop") : h("button", { key: "send", disabled: unsendable() }, chat.reading ? "Reading …" : "Send"));
}

function checkbox(name, text) {
  return h("label", null, h("input", { type: "checkbox", checked: chat[name], onchange: (event) => { chat[name] = event.target.checked; } }), ` ${text}`);
}

function more() {
  return h("div", { class: "more" },
    readsImages(modelName()) && fileButton("Image …", { accept: ACCEPTED, title: LIMITS }),
    fileButton("File …"),
    h("details", { id: "instructions" },
      h("summary", null, "System prompt", chat.system.trim() && ": in use"),
      h("label", { for: "system", class: "unseen" }, "System prompt"),
      h("textarea", { id: "system", rows: 3, value: chat.system, placeholder: "You answer briefly.", oninput: (event) => { chat.system = event.target.value; redraw(); } })),
    h("details", { id: "form" },
      h("summary", null, "Answer as JSON schema", chat.schema.trim() && ": in use"),
      h("label", { for: "schema", class: "unseen" }, "JSON schema"),
      h("textarea", { id: "schema", rows: 4, spellcheck: "false", value: chat.schema, placeholder: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}', "aria-invalid": chat.wrong ? "true" : null, "aria-describedby": "wrong", oninput: schemaTyped }),
      h("p", { id: "wrong", class: "trouble", role: "alert" }, chat.wrong)));
}

function fileButton(text, more) {
  return h("label", { key: text, class: "file", title: more?.title }, h("input", { type: "file", class: "unseen", multiple: true, onchange: filesChosen, ...more }), h("span", { class: "like-button" }, text));
}

function troubles() {
  const left = chat.troubles.length - TROUBLES_SHOWN;
  return [...chat.troubles.slice(0, TROUBLES_SHOWN), left > 0 && `${count(left)} more were not taken.`].filter(Boolean).map((text) => h("p", null, text));
}

function keyed(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) begin(event);
}

function known() {
  const usable = machines().filter((machine) => machine.state === "usable").flatMap((machine) => machine.models ?? []);
  const chats = [...usable, ...(models.listing?.installed ?? [])].filter((model) => !model.part_last && (model.roles ?? ["chat"]).includes("chat"));
  return [...new Set(chats.map((model) => model.name))].sort();
}

function question(turn) {
  const lines = turn.content.split("\n");
  const long = lines.length > FOLDED_LINES || turn.content.length > FOLDED_CHARS;
  const shown = long && !turn.open ? `${lines.slice(0, FOLDED_LINES).join("\n").slice(0, FOLDED_CHARS)} …` : turn.content;
  return [
    imageList("Images of this message", turn.images),
    shown && h("div", { key: "text", class: "text" }, shown),
    h("p", { class: "acts" },
      long && h("button", { key: "fold", class: "plain small", "aria-expanded": String(turn.open), onclick: () => { turn.open = !turn.open; redraw(); } }, turn.open ? "Show less" : `Show all ${counted(lines.length, "line")}`),
      !chat.abort && h("button", { key: "edit", class: "plain small", onclick: () => edit(turn) }, "Edit"))];
}

function reply(turn, last) {
  const ended = turn.ended !== undefined;
  return [
    turn.reasoning && h("details", null, h("summary", null, "Reasoning"), h("div", { class: "text quiet" }, turn.reasoning)),
    h("div", { class: "text rich" }, markdown(turn.content, (code) => copyButton("the code", code))),
    turn.error && h("p", { class: "trouble", role: "alert" }, turn.error.message, " ", h("span", { class: "quiet" }, turn.error.hint)),
    turn.smart && h("p", { class: "smart" }, turn.smart),
    h("p", { class: "quiet told" }, ended || turn.first !== null ? null : waiting(turn), figures(turn)),
    ended && h("p", { class: "acts" },
      turn.content && copyButton("the answer", turn.content),
      last && !chat.abort && h("button", { key: "retry", class: "plain small", disabled: unsendable(), onclick: retry }, "Retry"),
      turn.request && h("a", { key: "why", href: `#requests/${encodeURIComponent(turn.request)}` }, "Where the time went"))];
}

function waiting(turn) {
  const live = [...state.requests.values()].find((request) => turn.request && request.id.startsWith(turn.request));
  return live?.stage ? `${live.stage}${live.total ? `: ${count(live.done)} of ${count(live.total)}` : ""} ` : "Waiting … ";
}

function figures(turn) {
  const first_s = turn.first === null ? null : (turn.first - turn.began) / 1000;
  const tokens = turn.usage?.completion_tokens;
  return [turn.stopped && "stopped", first_s !== null && `first token ${seconds(first_s)}`, tokens && counted(tokens, "token"), tokens && turn.ended && rate(tokens - 1, (turn.ended - turn.first) / 1000),
    first_s !== null && place(turn.plan), ...(first_s === null ? [] : [turn.exactness, ...bitsOf(turn)])].filter(Boolean).join(" · ");
}

/** "on studio", "read with studio", or this machine's name, for "remote; nodes=studio" and the like. */
function place(plan) {
  const [kind, nodes = ""] = plan.split("; nodes=");
  const others = nodes.split(",").filter((node) => node && node !== "this");
  if (!kind) return "";
  if (!others.length) return `on ${hereName() || "this machine"}`;
  return kind === "remote" ? `on ${others[0]}${others.length > 1 ? `, read with ${others.slice(1).join(" and ")}` : ""}` : `read with ${others.join(" and ")}`;
}
