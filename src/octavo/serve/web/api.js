/** Calls to this server, with the API key if there is one. */

const STORED = "octavo-key";

let key = sessionStorage.getItem(STORED) ?? "";
let wanted = () => Promise.resolve("");
let asking = null;

/** `ask` gets a key from the user, or "". */
export function onKeyWanted(ask) {
  wanted = ask;
}

/** Ask for a key now; true if there is one to try. */
export async function askForKey() {
  asking ??= wanted().finally(() => { asking = null; });
  const given = await asking;
  if (!given) return false;
  key = given;
  sessionStorage.setItem(STORED, key);
  return true;
}

/** What the server said no to, with its status. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response to a request, which is fine. A key is asked for if one is needed.
 * Throws Refusal, or TypeError if the server cannot be reached. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401 && !options.quiet && (await askForKey())) return call(path, options);
  throw new Refusal(response.status, await messageOf(response));
}

/** What a JSON endpoint answers. */
export const get = async (path, options) => (await call(path, options)).json();

async function messageOf(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** The data of each server-sent event of a response, as it comes. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}
