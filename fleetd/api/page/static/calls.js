// Calls of the daemon. Each sends the session's key; the cookie beside it goes by itself.

const KEY = "fleetd-page-key";

/** A refusal or a lost connection: a sentence, and what to do. */
export class CallError extends Error {
  constructor(message, hint = "", code = "", status = 0) {
    super(message);
    this.hint = hint;
    this.code = code;
    this.status = status;
  }
}

// All tabs of this origin share it. Without the cookie, which no script can read, it opens nothing.
export const session = {
  get key() {
    return localStorage.getItem(KEY) ?? "";
  },
  set key(value) {
    if (value) localStorage.setItem(KEY, value);
    else localStorage.removeItem(KEY);
  },
  /** Calls back when another tab logs in or out. */
  onchange(tell) {
    addEventListener("storage", (event) => event.key === KEY && tell());
  },
};

/** The response; raises CallError unless it is a success. */
export async function call(method, path, body, { signal, headers } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: {
        "X-Fleet-Page": session.key,
        ...(method === "GET" ? {} : { "Content-Type": "application/json" }),
        ...headers,
      },
      body: method === "GET" ? undefined : JSON.stringify(body ?? {}),
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("The daemon does not answer.", "It may have stopped: `fleetctl status` tells.", "offline");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  const { message = `The daemon refused (HTTP ${response.status}).`, hint = "", code = "" } = said.error ?? {};
  throw new CallError(plainly(message, hint), hint, code, response.status);
}

// OpenAI's messages end in the hint, which is shown apart.
function plainly(message, hint) {
  return hint && message.endsWith(hint) ? message.slice(0, -hint.length).trimEnd() : message;
}

export async function get(path, options) {
  return (await call("GET", path, undefined, options)).json();
}

export async function post(path, body, options) {
  return (await call("POST", path, body, options)).json();
}

/** The objects of a stream of events, as they come. `heard` is called for everything that comes, comments too,
 * and `comment` with the text of each of these. */
export async function* events(response, heard = () => {}, comment = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith(": ")) comment(line.slice(2));
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const item = JSON.parse(line.slice(6));
        if (item.error) {
          const { message, hint = "", code = "" } = item.error;
          throw new CallError(plainly(message, hint), hint, code);
        }
        yield item;
      }
    }
  } catch (error) {
    if (error instanceof CallError || error.name === "AbortError") throw error;
    throw new CallError("The connection to the daemon broke.", "", "offline");
  } finally {
    reader.cancel().catch(() => {});
  }
}
