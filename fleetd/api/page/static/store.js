// What the page knows: the daemon's events, kept up to date, and when to draw.

import { CallError, call, events, get, session } from "/page/calls.js";

const SILENCE_MS = 12_000; // the daemon says something every four seconds
const RETRY_MS = [300, 700, 1500, 3000];
const MOST_TRACES = 1000;
const FIRST_TRACES = 100;

/** `link`: login, connecting, live or offline. `heard`: when the daemon last spoke, in ms. */
export const state = {
  link: "connecting",
  heard: 0,
  status: null,
  fleet: null,
  peers: new Map(),
  requests: new Map(),
  /** Newest first; null until they have come. */
  traces: null,
  tracesError: null,
  allTraces: false,
};

let draw = () => {};
let drawing = false;
const listeners = new Set();

/** Have the view drawn before the next frame; many changes make one drawing. */
export function redraw() {
  if (drawing) return;
  drawing = true;
  // A page in the background has no frames, and should be right when it is looked at.
  const soon = document.hidden ? (then) => setTimeout(then, 200) : requestAnimationFrame;
  soon(() => {
    drawing = false;
    draw();
  });
}

export function drawWith(function_) {
  draw = function_;
}

/** Called with each change of the fleet, before it is drawn. */
export function onChange(listener) {
  listeners.add(listener);
}

/** What people call this machine; "" before it is known. */
export function hereName() {
  return state.fleet?.name || state.status?.machine.hostname || "";
}

/** Say something to people who listen to the page. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

function apply(change) {
  if (change.full) {
    state.peers = new Map();
    state.requests = new Map();
    refreshTraces();
  }
  for (const listener of listeners) listener(change);
  if (change.status) state.status = change.status;
  if (change.fleet) state.fleet = change.fleet;
  merge(state.peers, change.peers);
  merge(state.requests, change.requests);
  if (change.traces) addTraces(change.traces);
}

function merge(known, changes) {
  for (const [key, value] of Object.entries(changes ?? {})) {
    if (value === null) known.delete(key);
    else known.set(key, value);
  }
}

function addTraces(ended) {
  // One that has ended may come while the list is fetched: it counts once.
  const before = (state.traces ?? []).filter((trace) => !ended.some((one) => same(one, trace)));
  state.traces = [...[...ended].reverse(), ...before].slice(0, MOST_TRACES);
}

function same(one, other) {
  return one.id === other.id && one.at_s === other.at_s;
}

/** Fetch the requests that have ended; `all` of them, or the newest. */
export async function refreshTraces(all = state.allTraces) {
  state.allTraces = all;
  try {
    const found = await get(`/fleet/v1/traces?last=${all ? 500 : FIRST_TRACES}`);
    const newer = state.traces ?? [];
    state.traces = found.traces;
    addTraces(newer.filter((trace) => trace.at_s > (found.traces[0]?.at_s ?? 0)).reverse());
    state.tracesError = null;
  } catch (error) {
    state.tracesError = error;
  }
  redraw();
}

let aborter = null;
let running = 0;

/** Stay connected from now on. Called again, it begins anew: the session may be another one. */
export async function connect() {
  const mine = ++running;
  aborter?.abort();
  for (let failures = 0; mine === running; ) {
    if (!session.key) return become("login");
    if (failures === 0 && state.link !== "live") become("connecting");
    try {
      for await (const change of listen()) {
        if (mine !== running) return undefined;
        failures = 0;
        apply(change);
        become("live");
      }
    } catch (error) {
      if (mine !== running) return undefined;
      if (error.status === 401 || error.status === 403) {
        session.key = "";
        return become("login");
      }
    }
    if (mine !== running) return undefined;
    become("offline");
    await new Promise((wake) => setTimeout(wake, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
  }
  return undefined;
}

async function* listen() {
  const own = (aborter = new AbortController());
  let silence;
  const heard = () => {
    state.heard = Date.now();
    clearTimeout(silence);
    silence = setTimeout(() => own.abort(), SILENCE_MS);
  };
  try {
    heard();
    const response = await call("GET", "/fleet/v1/events", undefined, { signal: own.signal });
    yield* events(response, heard);
  } catch (error) {
    throw error instanceof CallError ? error : new CallError("The daemon fell silent.", "", "offline");
  } finally {
    clearTimeout(silence);
  }
}

function become(link) {
  if (link !== state.link) {
    if (link === "offline") say("The daemon does not answer.");
    if (link === "live" && state.link === "offline") say("The daemon answers again.");
  }
  state.link = link;
  redraw();
}
