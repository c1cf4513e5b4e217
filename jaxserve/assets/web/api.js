// Calls of the server's own routes, by addresses relative to the page, so that it works behind a path prefix.

let key = localStorage.getItem("jaxserve.key") ?? sessionStorage.getItem("jaxserve.key") ?? "";

export const getKey = () => key;
export const isKept = () => localStorage.getItem("jaxserve.key") !== null;

export function setKey(value, keep) {
  key = value.trim();
  for (const store of [localStorage, sessionStorage]) store.removeItem("jaxserve.key");
  if (key) (keep ? localStorage : sessionStorage).setItem("jaxserve.key", key);
}

export async function call(path, options = {}) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...options.headers };
  let reply;
  try {
    reply = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server is not reached.");
  }
  if (!reply.ok) {
    const body = await reply.json().catch(() => null);
    const said = body?.error?.message ?? `The server answers ${reply.status}.`;
    const text = reply.status !== 401 ? said : key ? "The API key is wrong. Set it in Settings." : "The server needs an API key. Set it in Settings.";
    throw Object.assign(new Error(text), { status: reply.status });
  }
  return reply;
}

// Returns what a model does that is not loaded: only a server of several models says so. "" for one that is loaded.
export async function stateOf(model) {
  const { status } = await (await call(`v1/models/${encodeURIComponent(model)}`)).json();
  return !status || status.value === "loaded" ? "" : `${status.value}${status.progress ? ` (${status.progress})` : ""}`;
}

// Yields the chunks of a streamed answer. Throws if the stream ends before its last event.
export async function* stream(body, signal) {
  const reply = await call("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...body, stream: true }),
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server ended the connection before the answer was whole.");
    });
    if (done) throw new Error("The server ended the stream before the answer was whole.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
