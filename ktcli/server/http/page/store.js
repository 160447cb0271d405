// The conversations that this browser keeps. Records are changed one by one, and what another tab wrote stays.

import { IndexedTables, MemoryTables } from "./tables.js";

const BATCH = 200; // messages that are searched at once

export class Store {
  #tables;

  constructor(tables) {
    this.#tables = tables;
    this.isKept = tables instanceof IndexedTables; // else until the tab is closed
  }

  static async open() {
    const tables = new IndexedTables();
    try {
      await tables.run("readonly", () => {});
      return new Store(tables);
    } catch {
      return new Store(new MemoryTables());
    }
  }

  // The records of all conversations, those that are deleted included; the latest come first.
  async records() {
    const found = await this.#tables.run("readonly", ({ conversations }) => conversations.all());
    return found.sort((one, other) => other.changed - one.changed);
  }

  record(id) {
    return this.#tables.run("readonly", ({ conversations }) => conversations.get(id));
  }

  messages(id) {
    return this.#tables.run("readonly", ({ messages }) => messages.of(id));
  }

  // Some messages of a conversation by their ids: those that are there.
  some(id, ids) {
    return this.#tables.run("readonly", async ({ messages }) => {
      const found = await Promise.all(ids.map((each) => messages.get([id, each])));
      return found.filter(Boolean);
    });
  }

  // Stores messages and the time of their conversation; a record that is there keeps what else it says.
  async save(record, changed) {
    await this.#tables.run("readwrite", ({ messages }) => changed.forEach((each) => messages.put(each)));
    await this.#tables.run("readwrite", async ({ conversations }) => {
      const known = await conversations.get(record.id);
      conversations.put(known ? { ...known, changed: record.changed } : record);
    });
  }

  // Changes some fields of a conversation's record; one that is undefined is taken out.
  change(id, fields) {
    return this.#tables.run("readwrite", async ({ conversations }) => {
      const known = await conversations.get(id);
      if (known) conversations.put({ ...known, ...fields });
    });
  }

  // Notes which of its siblings a message was chosen before, and leaves the rest of it as it is.
  choose({ conversation, id, chosen }) {
    return this.#tables.run("readwrite", async ({ messages }) => {
      const known = await messages.get([conversation, id]);
      if (known) messages.put({ ...known, chosen });
    });
  }

  erase(id) {
    return this.#tables.run("readwrite", ({ conversations, messages }) => {
      conversations.remove(id);
      messages.removeOf(id);
    });
  }

  // Adds a conversation; of one that is there only the messages that it lacks. Returns whether it is new.
  addMissing(record, added) {
    return this.#tables.run("readwrite", async ({ conversations, messages }) => {
      const known = await conversations.get(record.id);
      const there = new Set((await messages.of(record.id)).map((each) => each.id));
      if (!known || known.deleted) conversations.put({ ...record, ...known, deleted: undefined });
      for (const each of added) if (!there.has(each.id)) messages.put(each);
      return !known;
    });
  }

  // The ids of conversations with a message that has a text, whatever its case.
  async search(text) {
    const wanted = text.toLowerCase(), found = new Set();
    for (let after = undefined; ;) {
      const batch = await this.#tables.run("readonly", ({ messages }) => messages.after(after, BATCH));
      for (const each of batch) {
        if (!found.has(each.conversation) && each.content.toLowerCase().includes(wanted)) found.add(each.conversation);
      }
      if (batch.length < BATCH) return found;
      after = [batch.at(-1).conversation, batch.at(-1).id];
    }
  }
}
