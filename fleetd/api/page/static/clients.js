// Cards for programs that talk to this daemon, each complete by itself, for a model that is chosen on top.
// None holds the token: `fleetctl env` gives it to a shell.

import { post } from "/page/calls.js";
import { h } from "/page/dom.js";
import { short } from "/page/fleet.js";
import { models, refresh } from "/page/listing.js";
import { redraw, say, state } from "/page/store.js";
import { count, seconds } from "/page/units.js";

// What an agent's own instructions and tools need to leave room for work (`fleetctl launch` asks for as much).
const AGENT_TOKENS = 32768;
const SHELL = 'eval "$(fleetctl env)"';
const KEY = "The key is what `fleetctl env` prints as OPENAI_API_KEY.";
let chosen = "";
let copied = "";
/** What "Test this" has come to: {model, waiting, answer, took_s, error}. */
let test = null;

/** {name, context_tokens, tools, installed} of the models that one can choose: those here, then recommended ones. */
function choices() {
  const { listing } = models;
  const offered = listing.catalog.filter((model) => model.recommended.some((work) => work !== "draft") && !model.installed);
  return [...listing.installed.map((model) => ({ ...model, installed: true })), ...offered];
}

function cards(model) {
  const base = `${location.origin}/v1`;
  const { name, context_tokens: context } = model;
  const output = Math.min(32000, Math.floor(context / 4));
  const json = (value) => JSON.stringify(value, null, 2);
  return [
    { name: "Claude Code", agent: true, note: "It gets its settings in its environment; its own files stay as they are.", text: `fleetctl launch -m ${name} claude` },
    { name: "Codex", agent: true, note: "It gets its settings as arguments; its own files stay as they are.", text: `fleetctl launch -m ${name} codex`,
      more: ["Without `launch`, in ~/.codex/config.toml", `model = "${name}"\nmodel_provider = "fleetd"\nmodel_context_window = ${context}\nshow_raw_agent_reasoning = true\n\n[model_providers.fleetd]\nname = "fleetd"\nbase_url = "${base}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"`,
        "and then", `${SHELL}\ncodex`] },
    { name: "opencode", agent: true, note: "It gets its settings in its environment; its own files stay as they are.", text: `fleetctl launch -m ${name} opencode` },
    { name: "Zed", editor: true, note: "In settings.json. The key goes into the agent's settings, LLM Providers, fleetd: it is what `fleetctl env` prints as OPENAI_API_KEY.",
      text: json({ language_models: { openai_compatible: { fleetd: { api_url: base, available_models: [{ name, display_name: `${short(name)} (fleetd)`, max_tokens: context, max_output_tokens: output,
        capabilities: { tools: Boolean(model.tools), images: Boolean(model.images), parallel_tool_calls: false, prompt_cache_key: false } }] } } } }) },
    { name: "VS Code (Continue)", editor: true, note: `In ~/.continue/config.yaml. ${KEY}`,
      text: `name: fleetd\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: ${short(name)}\n    provider: openai\n    model: ${name}\n    apiBase: ${base}\n    apiKey: KEY\n    roles: [chat, edit, apply]\n${model.tools ? "    capabilities: [tool_use]\n" : ""}    defaultCompletionOptions:\n      contextLength: ${context}\n      maxTokens: ${output}` },
    { name: "Cursor", editor: true, note: `Settings, Models: add the model by its name, and turn on “Override OpenAI Base URL”. Cursor's servers call that address, not your machine: it takes a tunnel with a public https address, whose name is listed in \`http.allowed_hosts\`, and your prompts pass Cursor's servers. ${KEY}`,
      text: `Model              ${name}\nOpenAI API Key     KEY\nOverride Base URL  YOUR-TUNNEL/v1` },
    { name: "Open WebUI", note: "From the environment, before its first start. Later it is a connection of the kind OpenAI in Admin Settings, Connections.",
      text: `pip install open-webui\n${SHELL}\nOPENAI_API_BASE_URL=$OPENAI_BASE_URL ENABLE_OLLAMA_API=False open-webui serve` },
    ollama(name),
    { name: "OpenAI's libraries, litellm, llm", note: "The line sets OPENAI_BASE_URL and OPENAI_API_KEY in this shell, which these programs read.", text: SHELL },
    { name: "Anthropic's libraries", note: "The line sets ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN in this shell.", text: 'eval "$(fleetctl env --anthropic)"' },
    { name: "Python", note: "In a shell.",
      text: `pip install openai\n${SHELL}\npython - <<'END'\nfrom openai import OpenAI\n\nanswer = OpenAI().chat.completions.create(\n    model="${name}",\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)\nEND` },
    { name: "curl", note: "In a shell.",
      text: `${SHELL}\ncurl "$OPENAI_BASE_URL/chat/completions" \\\n  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '{"model": "${name}", "messages": [{"role": "user", "content": "Hello"}]}'` },
    { name: "Any other app", note: `For programs that ask for the server of an OpenAI-compatible provider. ${KEY}`, text: `Base URL  ${base}\nModel     ${name}\nAPI key   KEY\nContext   ${context}` },
  ];
}

function ollama(name) {
  const address = state.status.ollama;
  if (address) return { name: "Ollama's clients", note: "They need no key at this address.", text: `export OLLAMA_HOST=http://${address.host}:${address.port}\nollama run ${name}` };
  return { name: "Ollama's clients", note: "The line sets OLLAMA_HOST and OLLAMA_API_KEY in this shell, for Ollama's Python library. Programs that send no key need an address of their own: the second text, in fleetd.toml, and a restart.",
    text: 'eval "$(fleetctl env --ollama)"', more: ["In fleetd.toml", '[http]\nollama_listen = "127.0.0.1:11434"'] };
}

async function copy(name, text) {
  try {
    await navigator.clipboard.writeText(text);
    copied = name;
    say(`${name}: copied.`);
  } catch {
    copied = "";
    say("The browser does not let this page copy: select the text.");
  }
  redraw();
}

async function ask(name) {
  const mine = { model: name, waiting: true };
  test = mine;
  redraw();
  const began = performance.now();
  let ended;
  try {
    const answer = await post("/v1/chat/completions", { model: name, messages: [{ role: "user", content: "Say hello in one short sentence." }], max_tokens: 60 });
    const { content, reasoning_content: thoughts } = answer.choices[0].message;
    ended = { model: name, answer: content || thoughts || "(an empty answer)", took_s: (performance.now() - began) / 1000 };
  } catch (error) {
    ended = { model: name, error };
  }
  if (test !== mine) return;
  test = ended;
  say(ended.error ? ended.error.message : "It has answered.");
  redraw();
}

export function clientsView() {
  const { listing, trouble } = models;
  if (listing === null) {
    if (!trouble) refresh();
    return trouble ? h("p", { class: "trouble" }, trouble.message, " ", h("button", { onclick: refresh }, "Try again")) : h("p", { class: "quiet" }, "Waiting for the models …");
  }
  const found = choices();
  const model = found.find((one) => one.name === chosen) ?? found.find((one) => one.name === state.status.default_model) ?? found[0];
  if (!model) return h("p", { class: "quiet" }, "No model is here yet. ", h("a", { href: "#models" }, "Get one."));
  return [picker(found, model), h("div", { class: "cards" }, cards(model).map((card) => section(card, model, found)))];
}

function picker(found, model) {
  const mine = test?.model === model.name ? test : null;
  return h("div", { key: "picker" },
    h("p", { class: "picker" }, h("label", { for: "client-model" }, "Every card is for"),
      h("select", { id: "client-model", value: model.name, onchange: (event) => { chosen = event.target.value; redraw(); } },
        found.map((one) => h("option", { key: one.name, value: one.name }, `${short(one.name)}${one.installed ? "" : " (not here yet)"}`))),
      h("span", { class: "quiet" }, `${count(model.context_tokens)} tokens of context`),
      h("button", { disabled: mine?.waiting || !model.installed, onclick: () => ask(model.name) }, mine?.waiting ? "Asking …" : "Test this"),
      !model.installed && h("a", { href: "#models" }, "Download it first")),
    mine?.answer && h("p", { key: "answer", class: "answer" }, h("span", { class: "quiet" }, `It answers after ${seconds(mine.took_s)}: `), mine.answer),
    mine?.error && h("p", { key: "error", class: "trouble", role: "alert" }, mine.error.message, " ", h("span", { class: "quiet" }, mine.error.hint)));
}

function section(card, model, found) {
  const short_ = (card.agent || card.editor) && model.context_tokens < AGENT_TOKENS;
  return h("section", { key: card.name, "aria-label": card.name },
    h("h2", null, card.name), short_ && cannot(card, model, found), h("p", { class: "quiet" }, marked(card.note)),
    block(card.text), copyButton(card.name, card.text),
    card.more && h("details", null, h("summary", null, marked(card.more[0])), card.more.slice(1).map((text, at) => (at % 2 ? h("p", { key: String(at), class: "quiet" }, marked(text)) : block(text)))));
}

/** This model's context is too short for an agent, or for that of an editor: name some that are long enough. */
function cannot(card, model, found) {
  const able = found.filter((one) => one.context_tokens >= AGENT_TOKENS);
  const has = `${short(model.name)} has ${count(model.context_tokens)} tokens of context`;
  return h("p", { class: "why" }, card.agent ? `This model cannot: ${has}, and ${card.name} needs ${count(AGENT_TOKENS)}. ` : `${has}: enough for short questions, and too few for the agent of ${card.name}. `,
    able.length ? [able.length > 1 ? "Take one of " : "Take ", able.slice(0, 3).map((one, at, all) => h("span", { key: one.name, class: "together" },
      h("button", { class: "plain small", onclick: () => { chosen = one.name; redraw(); } }, short(one.name)), at === all.length - 1 ? "." : ", "))]
      : "No model that fits this machine has as much.");
}

function block(text) {
  return h("pre", { tabindex: "0" }, h("code", null, text));
}

function copyButton(name, text) {
  return h("button", { onclick: () => copy(name, text), "aria-label": `Copy: ${name}` }, copied === name ? "Copied" : "Copy");
}

/** Text whose parts between backticks are code. */
function marked(text) {
  return text.split("`").map((part, at) => (at % 2 ? h("code", null, part) : part));
}
