// Images of a chat: which models read them, what a file has to be, and how they are shown. They are drawn on
// canvases: the page's policy allows no images from data: and blob: addresses. Of an animation a canvas has the
// first frame, which is the one that models read.

import { h } from "/page/dom.js";
import { models } from "/page/listing.js";
import { state } from "/page/store.js";
import { count } from "/page/units.js";

// As in fleetd/limits.py.
const MOST = 64;
const FILE_MIB = 20;
// In base64 they are 60 of the 64 MiB that a request may have.
const CHAT_MIB = 45;
const MIB = 2 ** 20;
/** What may be attached, as a sentence. */
export const LIMITS = `PNG, JPEG, WebP or GIF, at most ${FILE_MIB} MiB each; a chat takes ${MOST} images, ${CHAT_MIB} MiB in all.`;
// How files of a type begin, a character for a byte.
const TYPES = { "image/png": /^\x89PNG\r\n\x1a\n/, "image/jpeg": /^\xff\xd8\xff/, "image/webp": /^RIFF[^]{4}WEBP/, "image/gif": /^GIF8[79]a/ };
/** The types of files that may be attached. */
export const ACCEPTED = Object.keys(TYPES).join();
// The longer side on the page; twice as many pixels are drawn, for fine screens.
const SHOWN_PX = 320;
let made = 0;

/** Whether a model can be sent images, by its files here or by the machines that have it; undefined if that is not known. */
export function readsImages(name) {
  const here = models.listing?.installed.find((model) => model.name === name);
  if (here) return here.images;
  const there = [...state.peers.values()].flatMap((peer) => peer.models).filter((model) => model.name === name && !model.part_last);
  return there.length ? there.some((model) => model.shape?.images) : undefined;
}

/** The type of an image, by how its file begins; undefined if it is none that models read. */
export async function imageType(file) {
  const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  return Object.keys(TYPES).find((type) => TYPES[type].test(head));
}

/** An image's file as {id, name, bytes, width, height, url, small, shown_px}: `url` has it in base64, `small` is a
 * canvas with it, `shown_px` its width on the page. `others` are the images of its chat. Raises Error if it is too
 * large for itself or with them, or damaged. */
export async function readImage(file, type, others) {
  if (others.length >= MOST) throw new Error(`the chat has ${MOST} images, and takes no more.`);
  if (file.size > FILE_MIB * MIB) throw new Error(`it is larger than ${FILE_MIB} MiB.`);
  if (others.reduce((sum, one) => sum + one.bytes, file.size) > CHAT_MIB * MIB) throw new Error(`the images of the chat would be larger than ${CHAT_MIB} MiB.`);
  const found = { id: ++made, name: file.name, bytes: file.size };
  try {
    Object.assign(found, await drawn(file));
    found.url = await dataUrl(new Blob([file], { type }));
  } catch {
    throw new Error("it is damaged, or too large for this browser.");
  }
  return found;
}

async function drawn(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  const side = Math.max(width, height);
  const scale = Math.min(1, (2 * SHOWN_PX) / side);
  const small = Object.assign(document.createElement("canvas"), { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  const context = small.getContext("2d");
  context.imageSmoothingQuality = "high";
  // Transparent parts are white, as models see them.
  context.fillStyle = "white";
  context.fillRect(0, 0, small.width, small.height);
  context.drawImage(bitmap, 0, 0, small.width, small.height);
  bitmap.close();
  return { width, height, small, shown_px: Math.ceil(width * Math.min(1, SHOWN_PX / side)) };
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** A message's content as the API has it: images, then the text. */
export function contentOf(text, images) {
  if (!images.length) return text;
  return [...images.map(({ url }) => ({ type: "image_url", image_url: { url } })), ...(text.trim() ? [{ type: "text", text }] : [])];
}

/** Images as a list: small ones with a button if `remove` is given; nothing for none. */
export function imageList(label, images, remove) {
  return images.length > 0 && h("ul", { key: label, class: "images", "aria-label": label }, images.map((image) => h("li", { key: image.id },
    picture(image, remove ? null : image.shown_px),
    remove && h("button", { type: "button", "aria-label": `Remove ${image.name}`, title: "Remove", onclick: () => remove(image) }, "×"))));
}

function picture({ name, width, height, small }, shown_px) {
  const draw = (canvas) => {
    canvas.getContext("2d").drawImage(small, 0, 0);
    if (shown_px) canvas.style.width = `${shown_px}px`;
  };
  return h("canvas", { role: "img", "aria-label": name, title: `${name}, ${count(width)} × ${count(height)}`, width: small.width, height: small.height, made: draw });
}
