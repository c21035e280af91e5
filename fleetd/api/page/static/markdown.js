// Light Markdown as nodes: headings, lists, quotes, code, bold, italic, links. Text stays text: nothing of an
// answer ever becomes markup by itself, and links lead to http and https only.

import { h } from "/page/dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^>\s?/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;
// One alternative each: code, link, bare address, bold, italic.
const INLINE = /(`+)(.+?)\1(?!`)|\[([^\]\n]+)\]\((https?:\/\/[^\s()<>]+)\)|(https?:\/\/[^\s<>()[\]"'`]+[^\s<>()[\]"'`.,;:!?])|\*\*(?=\S)(.+?\S|\S)\*\*|(?<![\w*])[*_](?=[^\s*_])([^*_\n]*[^\s*_])[*_](?![\w*])/s;

const LONGEST = 10_000;
// A model may write marks in marks without end, and each level is a call.
const DEEPEST = 16;

/** `copy(text)` makes the button of a block of code. `depth`: how many quotes and lists it stands in. */
export function markdown(text, copy = () => null, depth = 0) {
  if (depth > DEEPEST) return [h("p", null, inline(text))];
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) at = block(lines, at, found, copy, depth);
  return found;
}

/** Reads one block at a line, adds it, and returns the line behind it. */
function block(lines, at, found, copy, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence, found, copy);
  if (!line.trim()) return at + 1;
  const heading = HEADING.exec(line);
  if (heading) {
    found.push(h("p", { class: "heading" }, h("strong", null, inline(heading[2]))));
    return at + 1;
  }
  if (RULE.test(line)) {
    found.push(h("hr"));
    return at + 1;
  }
  if (QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    found.push(h("blockquote", null, markdown(lines.slice(at, end).map((each) => each.replace(QUOTE, "")).join("\n"), copy, depth + 1)));
    return end;
  }
  if (ITEM.test(line)) return list(lines, at, found, copy, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !FENCE.test(lines[end]) && !HEADING.test(lines[end]) && !ITEM.test(lines[end]) && !QUOTE.test(lines[end])) end += 1;
  found.push(h("p", null, inline(lines.slice(at, end).join("\n"))));
  return end;
}

function code(lines, at, [, fence, language], found, copy) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(fence) && !lines[end].trim().replaceAll(fence[0], ""))) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  found.push(h("div", { class: "codeblock" }, h("p", { class: "quiet" }, language, copy(text)), h("pre", { tabindex: "0" }, h("code", null, text))));
  return end + 1;
}

function list(lines, at, found, copy, depth) {
  const [, indent, number] = ITEM.exec(lines[at]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length) {
      if ((item[2] === undefined) !== (number === undefined) || item[1].length < indent.length) break;
      items.push([item[3]]);
    } else if (!lines[end].trim()) {
      // A blank line ends the list unless it goes on behind it.
      const next = lines[end + 1] ?? "";
      if (!ITEM.test(next) && !/^\s{2,}\S/.test(next)) break;
      items[items.length - 1].push("");
    } else if (/^\s{2,}\S/.test(lines[end]) || item) items[items.length - 1].push(lines[end].replace(/^ {2,4}|^\t/, ""));
    else if (HEADING.test(lines[end]) || FENCE.test(lines[end]) || QUOTE.test(lines[end])) break;
    else items[items.length - 1].push(lines[end]);
    end += 1;
  }
  const start = number !== undefined && Number(number) !== 1 ? Number(number) : null;
  found.push(h(number === undefined ? "ul" : "ol", { start }, items.map((item) => {
    const inner = markdown(item.join("\n"), copy, depth + 1);
    // A short item is no paragraph.
    return h("li", null, inner.length && inner[0].tag === "p" ? [inner[0].children, inner.slice(1)] : inner);
  })));
  return Math.max(end, at + 1);
}

function inline(text) {
  // Marks are searched for up to the end of a paragraph, each from where it begins.
  if (text.length > LONGEST) return [text];
  const found = [];
  let rest = text;
  while (rest) {
    const match = INLINE.exec(rest);
    if (!match) break;
    const [all, , coded, label, address, bare, bold, italic] = match;
    if (match.index) found.push(rest.slice(0, match.index));
    if (coded !== undefined) found.push(h("code", null, coded.length > 2 && coded.startsWith(" ") && coded.endsWith(" ") ? coded.slice(1, -1) : coded));
    else if (label !== undefined) found.push(link(address, inline(label)));
    else if (bare !== undefined) found.push(link(bare, bare));
    else if (bold !== undefined) found.push(h("strong", null, inline(bold)));
    else found.push(h("em", null, inline(italic)));
    rest = rest.slice(match.index + all.length);
  }
  if (rest) found.push(rest);
  return found;
}

function link(address, label) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label);
}
