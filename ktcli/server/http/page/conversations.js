// The conversations of this tab: which one is open, what is asked in them, what is stored, and what other tabs stored.

import { Answering } from "./answering.js";
import { Conversation, TITLE, titleOf } from "./conversation.js";
import { inBrowser } from "./preferences.js";
import { soundSettings } from "./records.js";
import { StorageFull } from "./tables.js";
import { tell } from "./tabs.js";

const KEPT_MS = 30 * 86_400_000; // that a deleted conversation can be restored

export class Conversations {
  #opened = new Map(); // conversations by id, since what could not be stored must stay somewhere
  #opening = 0;
  #heardAll = Promise.resolve(); // once what other tabs said they had stored is read
  records = [];
  running = new Map(); // answers that this tab is writing, by the id of their conversation
  live = new Set(); // ids of messages that other tabs are writing

  // page: draw, grew, say, failed, saved, needsKey, model.
  constructor(store, page) {
    Object.assign(this, { store, page });
    this.current = Conversation.begin(this.defaults);
  }

  get isRunning() { return this.running.has(this.current.id); }

  // The settings of a new conversation.
  get defaults() {
    try {
      return soundSettings(JSON.parse(inBrowser("settings")));
    } catch {
      return {};
    }
  }

  set defaults(settings) {
    inBrowser("settings", JSON.stringify(settings));
  }

  // --- opening ------------------------------------------------------------------------------------------

  async start(id) {
    await this.reload();
    const expired = this.records.filter((each) => each.deleted < Date.now() - KEPT_MS);
    for (const { id } of expired) await this.erase(id);
    if (this.records.some((each) => each.id === id && !each.deleted)) await this.open(id);
  }

  // Reads anew what is stored.
  async reload() {
    const here = [...this.#opened.values()].filter((each) => !each.isEmpty).map((each) => each.record);
    try {
      const stored = await this.store.records(), known = new Set(stored.map((each) => each.id));
      for (const record of stored) if (this.#opened.has(record.id)) this.#opened.get(record.id).record = record;
      this.records = [...here.filter((each) => !known.has(each.id)), ...stored];
    } catch (error) {
      this.page.failed(error);
    }
    this.page.draw();
  }

  // Shows what was stored otherwise than by this object.
  async reread() {
    await this.reload();
    if (this.records.some((each) => each.id === this.current.id)) await this.open(this.current.id);
    tell("changed", { id: this.current.id });
  }

  async open(id) {
    const opening = ++this.#opening;
    this.live.clear(); // whoever still writes says so
    try {
      const messages = await this.store.messages(id);
      if (opening !== this.#opening) return; // another one was opened meanwhile
      this.#show(id, messages);
    } catch (error) {
      this.page.failed(error);
      if (this.#opened.has(id)) this.#show(id, []);
    }
    tell("who");
  }

  #show(id, messages) {
    const record = this.records.find((each) => each.id === id);
    if (!record) return this.begin(); // another tab deleted it for good
    const known = this.#opened.get(id) ?? new Conversation(record);
    known.merge(messages, (each) => this.#isOurs(each));
    this.#opened.set(id, known);
    this.current = known;
    this.page.draw();
  }

  #isOurs(message) {
    return this.running.get(message.conversation)?.message.id === message.id;
  }

  begin() {
    this.#opening++;
    this.current = Conversation.begin(this.defaults);
    this.page.draw();
  }

  // --- asking -------------------------------------------------------------------------------------------

  // Asks a question: behind the last answer, or as another version of an earlier question.
  ask(content, files, earlier) {
    const { current } = this, last = current.path().at(-1);
    const unanswered = last?.role === "user" ? last : null;
    const before = earlier ?? unanswered;
    const parent = before ? current.get(before.parent) ?? null : last ?? null;
    if (current.isEmpty && current.record.title === TITLE) current.record.title = titleOf(content || files[0].name);
    this.#opened.set(current.id, current);
    const question = current.add(parent, { role: "user", content, ...(files.length ? { files } : {}) });
    const stored = this.save(current, [question]);
    stored.then(() => this.reload());
    this.#answer(question, stored);
  }

  // Answers again, beside the answers that there are.
  retry(message) {
    if (this.isRunning) return;
    this.#answer(message.role === "user" ? message : this.current.get(message.parent) ?? null);
  }

  goOn(message) {
    if (!this.isRunning) this.#run(this.current, message, true);
  }

  // stored: a promise of the question; none where it was asked before.
  #answer(question, stored) {
    this.#run(this.current, this.current.add(question, { role: "assistant", content: "" }), false, stored);
  }

  async #run(conversation, message, isContinued, stored) {
    const host = {
      grew: () => this.page.grew(message),
      save: (...what) => this.save(...what),
      say: (words, isWrong) => { if (conversation === this.current) this.page.say(words, isWrong); },
      needsKey: this.page.needsKey,
    };
    const answering = new Answering(host, conversation, message);
    this.running.set(conversation.id, answering);
    this.page.draw();
    tell("answering", { message: message.id });
    host.say("Waiting for the answer …", false);
    await stored; // whatever becomes of the request, the question is there
    await answering.run(this.page.model(), isContinued);
    this.running.delete(conversation.id);
    if (answering.isEmpty) conversation.drop(message);
    this.page.draw();
    if (!answering.isEmpty && this.#opened.has(conversation.id)) await answering.save();
    tell("answered", { message: message.id });
    await this.reload();
  }

  stop() {
    this.running.get(this.current.id)?.stop();
  }

  // Shows another version of a message; returns it.
  choose(message, step) {
    const siblings = this.current.siblings(message), other = siblings[siblings.indexOf(message) + step];
    this.current.choose(other);
    this.store.choose(other).then(() => tell("changed", { id: this.current.id }), this.page.failed);
    this.page.draw();
    return other;
  }

  // --- storing ------------------------------------------------------------------------------------------

  // Stores messages of a conversation, and those that there was no room for before.
  async save(conversation, messages) {
    conversation.record.changed = Date.now();
    const waiting = [...conversation.unsaved].map((id) => conversation.get(id)).filter(Boolean);
    const all = [...new Set([...messages, ...waiting])];
    try {
      await this.store.save(conversation.record, all);
      for (const each of all) conversation.unsaved.delete(each.id);
      if (![...this.#opened.values()].some((each) => each.unsaved.size && !each.record.deleted)) this.page.saved();
      tell("changed", { id: conversation.id, messages: all.map((each) => each.id) });
    } catch (error) {
      for (const each of all) conversation.unsaved.add(each.id);
      this.page.failed(error);
    }
  }

  // All messages of a conversation, those that there was no room for included.
  async messages(id) {
    return this.#opened.get(id)?.all ?? this.store.messages(id);
  }

  // Stores what was written of answers, since the page may be left.
  saveRunning() {
    for (const answering of this.running.values()) if (!answering.isEmpty) answering.save();
  }

  leave() {
    this.saveRunning();
    for (const { message } of this.running.values()) tell("answered", { message: message.id });
  }

  // Changes fields of a conversation's record.
  async change(conversation, fields) {
    await this.#changed(conversation.id, fields);
  }

  // Takes a conversation off the list. It stays for a while, and can be restored. Returns its record.
  async remove(id) {
    this.running.get(id)?.stop();
    if (id === this.current.id) this.begin();
    await this.#changed(id, { deleted: Date.now() }, "gone");
    return this.records.find((each) => each.id === id);
  }

  async restore(id, isOpened = false) {
    await this.#changed(id, { deleted: undefined });
    if (isOpened) await this.open(id);
  }

  async erase(id) {
    this.#opened.delete(id);
    try {
      await this.store.erase(id);
      tell("erased", { id });
    } catch (error) {
      this.page.failed(error);
    }
    await this.reload();
  }

  // Makes room: a conversation that is deleted while the storage is full can be restored until the tab is closed.
  async #moveOut(id, fields) {
    const record = { ...this.records.find((each) => each.id === id), ...fields };
    const opened = this.#opened.get(id) ?? new Conversation(record, await this.store.messages(id));
    for (const message of opened.all) opened.unsaved.add(message.id);
    this.#opened.set(id, opened);
    await this.store.erase(id);
    tell("gone", { id });
  }

  // Changes a record here, where it may not be stored, and in the store.
  async #changed(id, fields, kind = "changed") {
    const opened = this.#opened.get(id) ?? (id === this.current.id ? this.current : null);
    if (opened) Object.assign(opened.record, fields);
    try {
      if (opened?.unsaved.size && !opened.record.deleted) await this.save(opened, []);
      await this.store.change(id, fields);
      tell(kind, { id });
    } catch (error) {
      if (error instanceof StorageFull && fields.deleted) await this.#moveOut(id, fields);
      else this.page.failed(error);
    }
    await this.reload();
  }

  // --- what other tabs say ------------------------------------------------------------------------------

  get handlers() {
    return {
      // One after the other: an answer that is known before its question would be taken for a first message.
      changed: ({ id, messages }) => { this.#heardAll = this.#heardAll.then(() => this.#heard(id, messages)).catch(this.page.failed); },
      gone: ({ id }) => this.#left(id),
      erased: ({ id }) => { this.#opened.delete(id); this.#left(id); },
      answering: async ({ message }) => { await this.#heardAll; this.live.add(message); this.page.draw(); }, // in their order
      // Not before its last words are read: a Retry that is there earlier would be drawn anew under the pointer.
      answered: async ({ message }) => { await this.#heardAll; this.live.delete(message); this.page.draw(); },
      who: () => { for (const { message } of this.running.values()) tell("answering", { message: message.id }); },
    };
  }

  #left(id) {
    this.running.get(id)?.stop();
    if (id === this.current.id) this.begin();
    this.reload();
  }

  // messages: ids of those that changed; without: it may be any.
  async #heard(id, messages) {
    const known = this.#opened.get(id);
    if (known) known.merge(await (messages ? this.store.some(id, messages) : this.store.messages(id)), (each) => this.#isOurs(each));
    await this.reload();
  }
}
