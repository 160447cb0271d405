// Asks the server that this page came from.

import { inSession } from "./preferences.js";

const KEY = "key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = inSession(KEY); // kept until the tab is closed

export function remember(said) {
  key = said;
  inSession(KEY, said);
}

async function ask(path, about = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...about, headers });
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, said.error?.message ?? `the server answered with HTTP ${reply.status}`);
}

// Those that generate text.
export async function models() {
  const rows = (await (await ask("v1/models")).json()).data;
  return rows.filter((row) => row.capabilities?.includes("completion") ?? true);
}

// The events of an answer, as they come.
// options: fields of the request beside the messages.
export async function* answer(model, messages, options, signal) {
  const told = { stream: true, stream_options: { include_usage: true }, return_progress: true };
  const body = JSON.stringify({ ...options, model, messages, ...told });
  const reply = await ask("v1/chat/completions", { method: "POST", body, signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the answer was interrupted");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(0, event.error.message);
      yield event;
    }
  }
}
