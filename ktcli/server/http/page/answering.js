// An answer that is being written: what is asked, how events become a message, and when it is stored.

import { Refused, answer } from "./api.js";
import { withFiles } from "./attachments.js";
import { SAMPLING } from "./sampling.js";

export const COMPLETE = "The answer is complete.";
const SAVE_MS = 700; // between two times that an answer is stored while it grows

// The fields of a request that a conversation's settings say.
const optionsOf = (settings) =>
  Object.fromEntries(SAMPLING.map(({ name }) => [name, settings[name]]).filter(([, value]) => value !== undefined));

function asked(path, settings) {
  const messages = path.map(({ role, content, files, thoughts }) => ({
    role, content: withFiles(content, files), ...(thoughts ? { reasoning_content: thoughts } : {}),
  }));
  return settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
}

const number = (value) => value.toLocaleString("en");

export class Answering {
  #control = new AbortController();
  #saved = 0;
  #said = "";

  // host: what the page does: `grew`, `save`, `say`, `needsKey`.
  constructor(host, conversation, message) {
    Object.assign(this, { host, conversation, message, isDone: false });
  }

  get isEmpty() { return !this.message.content && !this.message.thoughts; }

  stop() { this.#control.abort(); }

  // Says something once, so that each token does not say it anew.
  #say(words, isWrong = false) {
    if (words !== this.#said) this.host.say(words, isWrong);
    this.#said = words;
  }

  // Ends when the answer has ended, whatever happened.
  async run(model, isContinued) {
    const { conversation, message } = this, { settings } = conversation.record;
    const path = conversation.path();
    const before = path.slice(0, path.indexOf(message) + (isContinued ? 1 : 0));
    const options = { ...optionsOf(settings), ...(isContinued ? { continue_final_message: true, add_generation_prompt: false } : {}) };
    const stateBefore = message.state, length = message.content.length;
    Object.assign(message, { state: "open", model });
    this.#say("Waiting for the answer …");
    try {
      for await (const event of answer(model, asked(before, settings), options, this.#control.signal)) this.#take(event);
      const isCut = message.state === "length";
      this.#end(isCut ? "length" : undefined, isCut ? "The answer reached the token limit." : COMPLETE);
    } catch (error) {
      this.#failed(error, message.content.length > length || !isContinued ? undefined : stateBefore);
    }
  }

  #take(event) {
    const { message } = this, [choice] = event.choices, delta = choice?.delta ?? {};
    message.content += delta.content ?? "";
    if (delta.reasoning_content) message.thoughts = (message.thoughts ?? "") + delta.reasoning_content;
    if (delta.reasoning_content) this.#say("Thinking …");
    else if (delta.content) this.#say("Answering …");
    if (choice?.finish_reason === "length") message.state = "length";
    const progress = event.prompt_progress;
    if (progress && progress.processed < progress.total) {
      this.#say(`Reading ${number(progress.processed)} of ${number(progress.total)} tokens …`);
    }
    if (event.usage) message.used = event.usage.total_tokens;
    if (event.timings) {
      const { predicted_per_second: rate, predicted_n: tokens, cache_n: cached } = event.timings;
      message.speed = { rate, tokens, cached: cached ?? 0 };
    }
    this.host.grew(this);
    if (!this.isEmpty && performance.now() - this.#saved > SAVE_MS) this.save();
  }

  save() {
    this.#saved = performance.now();
    return this.host.save(this.conversation, [this.message]);
  }

  #end(state, words, isWrong = false) {
    this.message.state = state;
    this.isDone = true;
    this.#say(words, isWrong);
  }

  #failed(error, state) {
    if (error.name === "AbortError") return this.#end(state ?? "stopped", "Stopped.");
    if (error.status === 401) {
      this.#end(state ?? "interrupted", "This server needs an API key.", true);
      return this.host.needsKey();
    }
    this.#end(state ?? "interrupted", error instanceof Refused ? error.message : `Cannot reach the server: ${error.message}`, true);
  }
}
