// The fleet as a picture. Places follow from the order of names, so nothing moves unless a machine comes or goes.

import { h } from "/page/dom.js";
import { redraw } from "/page/store.js";
import { bytes, stateWord } from "/page/units.js";

const MOST_LABELS = 14;
const NAME_CHARS = 14;
const narrow = matchMedia("(max-width: 767px)");
narrow.addEventListener("change", redraw);

// Text keeps its size: a narrow screen gets a narrow picture, not a small one.
function size(number) {
  const width = narrow.matches ? 320 : 900;
  return [width, number > 24 ? 300 : number === 2 ? 90 : narrow.matches ? 200 : number > 6 ? 210 : 150];
}

/** Where each of `number` other machines stands: on an ellipse around this one, or on two for many. */
export function places(number, [width, height]) {
  const found = [];
  const inner = number > 24 ? Math.floor(number * 0.4) : 0;
  for (let at = 0; at < number; at++) {
    const [ring, index, of] = at < inner ? [0.62, at, inner] : [1, at - inner, number - inner];
    const angle = of === 1 ? 0 : (2 * Math.PI * (index + (ring < 1 ? 0.5 : 0))) / of - (of === 2 ? 0 : Math.PI / 2);
    found.push([width / 2 + ring * Math.min(width / 2 - 56, 330) * Math.cos(angle), height / 2 - 4 + ring * (height / 2 - 34) * Math.sin(angle)]);
  }
  return found;
}

/** `shown`: so many of them are drawn, at the places that all of them give. */
export function picture([here, ...others], shown = Infinity) {
  const [width, height] = size(others.length);
  const spots = places(others.length, [width, height]);
  const labels = others.length <= (narrow.matches ? MOST_LABELS / 2 : MOST_LABELS);
  const centre = [width / 2, height / 2 - 4];
  const usable = others.filter((machine) => machine.state === "usable").length;
  const label = others.length ? `${here.name} in the middle, ${usable} of ${others.length} other machines connected. The list below has every figure.` : `${here.name}, alone.`;
  return h("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    others.slice(0, shown).map((machine, at) => line(machine, centre, spots[at], labels)),
    others.slice(0, shown).map((machine, at) => spot(machine, spots[at], labels)),
    spot(here, centre, true));
}

function atWork(machine) {
  return machine.state === "usable" && (machine.running > 0 || machine.vectors > 0);
}

function line(machine, [x1, y1], [x2, y2], labels) {
  const rate = machine.link?.bytes_per_s;
  // Ten times as fast is 1.5 units wider.
  const width = rate ? Math.max(1, Math.min(7, 1.5 * Math.log10(rate / 1e6))) : 1;
  return h("g", { key: `line ${machine.id}`, class: `edge ${machine.state}${atWork(machine) ? " busy" : ""}` },
    atWork(machine) && h("line", { class: "flow", x1, y1, x2: x2.toFixed(1), y2: y2.toFixed(1) }),
    h("line", { x1, y1, x2: x2.toFixed(1), y2: y2.toFixed(1), "stroke-width": width.toFixed(1) }),
    labels && rate && h("text", { x: (x1 + 0.54 * (x2 - x1)).toFixed(1), y: (y1 + 0.54 * (y2 - y1) - 7).toFixed(1), class: "speed" }, `${bytes(rate)}/s`));
}

function spot(machine, [x, y], labelled) {
  // Area follows memory: 8 GB and 512 GB both have to be seen.
  const radius = machine.total ? Math.max(7, Math.min(24, 3.1 * Math.log2(machine.total / 2 ** 30))) : 7;
  const radius_ = labelled ? radius : Math.min(radius, 9);
  const below = y + radius_ + 14;
  return h("g", { key: `spot ${machine.id}`, class: `spot ${machine.state}${machine.here ? " here" : ""}${atWork(machine) ? " busy" : ""}` },
    h("title", null, `${machine.name}: ${stateWord(machine.state)}${machine.reason ? `, ${machine.reason}` : ""}`),
    h("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: radius_.toFixed(1) }),
    labelled && h("text", { x: x.toFixed(1), y: below.toFixed(1), class: "label" }, cut(machine.name)));
}

function cut(name) {
  return name.length > NAME_CHARS ? `${name.slice(0, NAME_CHARS - 1)}…` : name;
}
