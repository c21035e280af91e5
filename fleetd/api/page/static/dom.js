// Views are functions of the state: they return nodes made by h(), and patch() changes the document to match.
// Elements stay the same from one drawing to the next, so focus, selection and half-typed text stay too.

const SVG = "http://www.w3.org/2000/svg";
// Set as properties: the attribute of that name says how an element began.
const PROPERTIES = new Set(["value", "checked", "disabled", "selected", "indeterminate"]);
// Control characters, invisible ones and ones that turn the writing direction, but for line breaks, tabs and
// what joins emoji. A name or an answer that holds them shows them.
const HIDDEN = /(?![\n\t\u200c\u200d\ufe0f])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

/** A node: h("p", {class: "quiet"}, "text", more). Children may be arrays, and null or false for nothing. */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: flat(children, []), key: props?.key };
}

/** Text with every hidden character spelled out, as \u{1b}. */
export function visible(text) {
  return text.replace(HIDDEN, (each) => `\\u{${each.codePointAt(0).toString(16)}}`);
}

/** Make the children of an element those nodes. */
export function patch(parent, nodes, svg = false) {
  const keyed = new Map();
  const plain = [];
  for (const element of parent.childNodes) {
    if (element.fleetKey !== undefined) keyed.set(element.fleetKey, element);
    else plain.push(element);
  }
  const wanted = flat([nodes], []);
  const keys = new Set(wanted.map((node) => node.key));
  // What is gone leaves first: what follows then stands where it should, and is not moved.
  for (const [key, element] of keyed) if (!keys.has(key)) element.remove();
  const kept = new Set();
  let next = 0;
  let place = parent.firstChild;
  for (const node of wanted) {
    let element;
    if (node.key !== undefined) element = keyed.get(node.key);
    else if (next < plain.length) element = plain[next++];
    if (element === undefined || kept.has(element) || !alike(element, node)) element = made(node, svg);
    else updated(element, node, svg);
    kept.add(element);
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
  while (place !== null) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

function flat(children, into) {
  for (const child of children) {
    if (Array.isArray(child)) flat(child, into);
    else if (child === null || child === undefined || child === false || child === true) continue;
    else if (typeof child === "object") into.push(child);
    else into.push({ text: visible(String(child)) });
  }
  return into;
}

function alike(element, node) {
  if (node.text !== undefined) return element.nodeType === Node.TEXT_NODE;
  return element.localName === node.tag;
}

function made(node, svg) {
  if (node.text !== undefined) return document.createTextNode(node.text);
  const inside = svg || node.tag === "svg";
  const element = inside ? document.createElementNS(SVG, node.tag) : document.createElement(node.tag);
  if (node.key !== undefined) element.fleetKey = node.key;
  updated(element, node, inside);
  node.props.made?.(element);
  return element;
}

function updated(element, node, svg) {
  if (node.text !== undefined) {
    if (element.data !== node.text) element.data = node.text;
    return;
  }
  // A node that a view has kept from the last drawing says that nothing in it has changed.
  if (element.fleetNode === node) return;
  const before = element.fleetProps ?? {};
  for (const name of Object.keys(before)) if (!(name in node.props)) assign(element, name, undefined);
  // A select takes its value once it has its options.
  patch(element, node.children, svg || node.tag === "svg");
  for (const [name, value] of Object.entries(node.props)) {
    if (value !== before[name] || PROPERTIES.has(name)) assign(element, name, value);
  }
  element.fleetProps = node.props;
  element.fleetNode = node;
}

function assign(element, name, value) {
  if (name === "key" || name === "made") return;
  if (name.startsWith("on")) element[name] = value ?? null;
  else if (PROPERTIES.has(name)) {
    const wanted = value ?? (name === "value" ? "" : false);
    if (element[name] !== wanted) element[name] = wanted;
  } else if (value === undefined || value === null || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : visible(String(value)));
}
