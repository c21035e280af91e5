// Cards for programs that talk to this daemon. None holds the token: `fleetctl env` gives it to a shell.

import { h } from "/page/dom.js";
import { redraw, say, state } from "/page/store.js";

let copied = "";

function cards() {
  const base = `${location.origin}/v1`;
  const model = state.status.default_model;
  const shell = 'eval "$(fleetctl env)"';
  return [
    ["OpenAI's libraries, litellm, llm", "Sets OPENAI_BASE_URL and OPENAI_API_KEY.", shell],
    ["Anthropic's libraries", "Sets ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN.", 'eval "$(fleetctl env --anthropic)"'],
    ["Claude Code", "Needs a model with tool calls and a context of 32,768 tokens.", "fleetctl launch claude"],
    ["Codex", "In ~/.codex/config.toml; then the line of the first card, and codex.",
      `model = "${model}"\nmodel_provider = "fleetd"\nmodel_context_window = 32768\nshow_raw_agent_reasoning = true\n\n[model_providers.fleetd]\nname = "fleetd"\nbase_url = "${base}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"`],
    ["Python", "pip install openai, and the line of the first card.",
      `from openai import OpenAI\n\nanswer = OpenAI().chat.completions.create(\n    model="${model}",\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)`],
    ["curl", "After the line of the first card.",
      `curl "$OPENAI_BASE_URL/chat/completions" \\\n  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\\n  -d '{"model": "${model}", "messages": [{"role": "user", "content": "Hello"}]}'`],
    ["Programs with fields for it", "The key is what `fleetctl env` prints as OPENAI_API_KEY.", `Base URL  ${base}\nModel     ${model}`],
  ];
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

export function clientsView() {
  return h("div", { class: "cards" }, cards().map(([name, note, text]) => h("section", { key: name, "aria-label": name },
    h("h2", null, name), h("p", { class: "quiet" }, note),
    h("pre", { tabindex: "0" }, h("code", null, text)),
    h("button", { onclick: () => copy(name, text), "aria-label": `Copy: ${name}` }, copied === name ? "Copied" : "Copy"))));
}
