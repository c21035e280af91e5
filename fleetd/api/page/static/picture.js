// The fleet as a picture. Places follow from the order of names, so nothing moves unless a machine comes or goes.

import { h } from "/page/dom.js";
import { bytes, count } from "/page/units.js";

const WIDTH = 720;
const HEIGHT = 300;
const MOST_LABELS = 14;
const NAME_CHARS = 14;

/** Where each of `number` other machines stands: on an ellipse around this one, or on two for many. */
export function places(number) {
  const found = [];
  const inner = number > 24 ? Math.floor(number * 0.4) : 0;
  for (let at = 0; at < number; at++) {
    const [ring, index, of] = at < inner ? [0.62, at, inner] : [1, at - inner, number - inner];
    const angle = of === 1 ? 0 : (2 * Math.PI * (index + (ring < 1 ? 0.5 : 0))) / of - (of === 2 ? 0 : Math.PI / 2);
    found.push([WIDTH / 2 + ring * 270 * Math.cos(angle), HEIGHT / 2 + ring * 106 * Math.sin(angle)]);
  }
  return found;
}

export function picture([here, ...others]) {
  const spots = places(others.length);
  const labels = others.length <= MOST_LABELS;
  const centre = [WIDTH / 2, HEIGHT / 2];
  const usable = others.filter((machine) => machine.state === "usable").length;
  const label = others.length ? `${here.name} in the middle, ${usable} of ${others.length} other machines connected. The list below has every figure.` : `${here.name}, alone.`;
  return h("svg", { class: "picture", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    others.map((machine, at) => line(machine, centre, spots[at], labels)),
    others.map((machine, at) => spot(machine, spots[at], labels)),
    spot(here, centre, true));
}

function line(machine, [x1, y1], [x2, y2], labels) {
  const rate = machine.link?.bytes_per_s;
  // Ten times as fast is 1.5 units wider.
  const width = rate ? Math.max(1, Math.min(7, 1.5 * Math.log10(rate / 1e6))) : 1;
  return h("g", { key: `line ${machine.id}`, class: `edge ${machine.state}${machine.running ? " busy" : ""}` },
    h("line", { x1, y1, x2: x2.toFixed(1), y2: y2.toFixed(1), "stroke-width": width.toFixed(1) }),
    labels && rate && h("text", { x: (x1 + 0.54 * (x2 - x1)).toFixed(1), y: (y1 + 0.54 * (y2 - y1) + 4).toFixed(1), class: "speed" }, `${bytes(rate)}/s`));
}

function spot(machine, [x, y], labelled) {
  // Area follows memory: 8 GiB and 512 GiB both have to be seen.
  const radius = machine.total ? Math.max(7, Math.min(24, 3.1 * Math.log2(machine.total / 2 ** 30))) : 7;
  const radius_ = labelled ? radius : Math.min(radius, 9);
  const loaded = (machine.models ?? []).filter((model) => model.state === "loaded").length;
  const below = y + radius_ + 14;
  return h("g", { key: `spot ${machine.id}`, class: `spot ${machine.state}${machine.here ? " here" : ""}${machine.running ? " busy" : ""}` },
    h("title", null, `${machine.name}: ${machine.state}${machine.reason ? `, ${machine.reason}` : ""}`),
    h("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: radius_.toFixed(1) }),
    loaded > 0 && labelled && h("text", { x: x.toFixed(1), y: (y + 4).toFixed(1), class: "inside" }, count(loaded)),
    labelled && h("text", { x: x.toFixed(1), y: below.toFixed(1), class: "name" }, cut(machine.name)));
}

function cut(name) {
  return name.length > NAME_CHARS ? `${name.slice(0, NAME_CHARS - 1)}…` : name;
}
