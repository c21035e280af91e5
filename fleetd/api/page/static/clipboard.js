// Copying a text, and the button that does it.

import { h } from "/page/dom.js";
import { redraw, say } from "/page/store.js";

const SHOWN_MS = 2000;
let copied = null;

export async function copy(name, text) {
  try {
    await navigator.clipboard.writeText(text);
    copied = text;
    say(`${name}: copied.`);
    setTimeout(() => { copied = null; redraw(); }, SHOWN_MS);
  } catch {
    say("The browser does not let this page copy: select the text.");
  }
  redraw();
}

export function copyButton(name, text) {
  return h("button", { class: "plain small", type: "button", "aria-label": `Copy: ${name}`, onclick: () => copy(name, text) }, copied === text ? "Copied" : "Copy");
}
