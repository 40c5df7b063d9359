// Calls to this gateway. Addresses are relative to the page, so that a proxy may give it a prefix. The key, where one is
// needed, is kept in this tab only and sent as a header: no cookie, hence no request of another site has it.
const KEY = "disagg-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}

export function storeKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Storage may be forbidden: then the key is asked for again after a reload.
  }
}

export async function call(path, { key, method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const options = { method, headers: sent, signal, cache: "no-store", credentials: "omit" };
  const response = await fetch(path, body === undefined ? options : { ...options, body: JSON.stringify(body) });
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return String(error.message || error);
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();

// Server-sent events of a response: {event, data} for each; comments are left out.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const found = parse(block);
      if (found.data) yield found;
    }
  }
}

function parse(block) {
  const found = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) found.event = line.slice(7);
    else if (line.startsWith("data: ")) found.data += line.slice(6);
  }
  return found;
}
