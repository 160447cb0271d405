// Asks the server that this page came from.

const KEY = "kt.key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const remember = (key) => sessionStorage.setItem(KEY, key);

async function ask(path, about = {}) {
  const key = sessionStorage.getItem(KEY), headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...about, headers });
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, said.error?.message ?? `the server answered with HTTP ${reply.status}`);
}

export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

// The events of an answer, as they come.
export async function* answer(model, messages, signal) {
  const body = JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true }, return_progress: true });
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
