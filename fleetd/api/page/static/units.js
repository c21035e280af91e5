// Numbers with their units, the same everywhere.

const UNITS = ["B", "kB", "MB", "GB", "TB"];
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const none = "–";

// The states of a machine that people call otherwise; `fleet_words.py` of fleetctl has the same words.
const STATES = { quiet: "silent", draining: "stopping", incompatible: "other version" };

/** What people call the state of a machine. */
export function stateWord(state) {
  return STATES[state] ?? state;
}

/** 12,345 */
export function count(value) {
  return value === null || value === undefined ? none : whole.format(value);
}

/** "1 token", "2 tokens" */
export function counted(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

/** 1.5 GB, in powers of 1000 as cables and disks are sold. */
export function bytes(value) {
  return scaled(value, 10);
}

/** 25.3 GB, in the same units; a digit more, as memory is compared. */
export function memory(value) {
  return scaled(value, 100);
}

// Below `exact` a value has one digit behind the point.
function scaled(value, exact) {
  if (value === null || value === undefined) return none;
  let at = 0;
  while (value >= 1000 && at < UNITS.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at && value < exact ? value.toFixed(1) : whole.format(value)} ${UNITS[at]}`;
}

/** 0.12 s, 3.4 s, 2 min 5 s, 3 h 4 min */
export function seconds(value) {
  if (value === null || value === undefined) return none;
  const size = Math.abs(value);
  if (size < 0.0005) return "0 s";
  if (size < 0.1) return `${(value * 1000).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 10) return `${value.toFixed(2)} s`;
  if (size < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(size / 60);
  const sign = value < 0 ? "-" : "";
  if (minutes < 60) return `${sign}${minutes} min ${Math.floor(size % 60)} s`;
  if (minutes < 2880) return `${sign}${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${sign}${Math.floor(minutes / 1440)} days`;
}

/** 23.4 tok/s */
export function rate(tokens, time_s) {
  return tokens > 0 && time_s > 0 ? speed(tokens / time_s) : none;
}

export function speed(value) {
  return value > 0 ? `${value < 100 ? value.toFixed(1) : whole.format(value)} tok/s` : none;
}

/** ["KV 8 bits", "wire 8 bits"]: in how many bits keys and values were held, and sent, where that is not as computed. */
export function bitsOf({ kv_bits: held, wire_bits: sent }) {
  return [held > 0 && `KV ${held} bits`, sent > 0 && `wire ${sent} bits`].filter(Boolean);
}

/** +12 %, against what was planned */
export function deviation(actual, planned) {
  if (actual === null || actual === undefined || !planned) return none;
  const percent = 100 * (actual / planned - 1);
  if (Math.abs(percent) >= 999.5) return `${whole.format(actual / planned)}×`;
  return `${percent >= 0 ? "+" : "−"}${Math.abs(percent).toFixed(0)} %`;
}

export function percent(part, of) {
  return of ? `${((100 * part) / of).toFixed(0)} %` : none;
}

/** The time of day, with the day where it is not today. Unix seconds. */
export function moment(at_s) {
  const then = new Date(at_s * 1000);
  const time = then.toLocaleTimeString("en-GB");
  return then.toDateString() === new Date().toDateString() ? time : `${day(then)} ${time}`;
}

/** 2026-01-31, by this machine's clock */
export function day(date) {
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}
