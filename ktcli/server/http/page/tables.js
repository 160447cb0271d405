// Two tables, in the browser's database or, where it is blocked, in memory: `conversations` by their id, and `messages` by
// their conversation and id, so that two tabs that write different messages never overwrite each other's.

const NAME = "kt", VERSION = 1;

export class StorageFull extends Error {}

const promised = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
});

const within = (conversation) => IDBKeyRange.bound([conversation], [conversation, []]); // arrays come behind all texts

const tableOf = (store) => ({
  get: (key) => promised(store.get(key)),
  all: () => promised(store.getAll()),
  of: (conversation) => promised(store.getAll(within(conversation))),
  after: (key, count) => promised(store.getAll(key && IDBKeyRange.lowerBound(key, true), count)),
  put: (value) => { store.put(value); }, // that it failed is known when the transaction ends
  remove: (key) => { store.delete(key); },
  removeOf: (conversation) => { store.delete(within(conversation)); },
});

export class IndexedTables {
  #database = null;

  // Runs `work` with the tables in one transaction: all of it is stored, or nothing.
  async run(mode, work) {
    this.#database ??= await this.#open();
    const transaction = this.#database.transaction(["conversations", "messages"], mode);
    const ended = new Promise((done, failed) => {
      transaction.oncomplete = done;
      transaction.onabort = () => failed(transaction.error ?? new Error("the database aborted a transaction"));
    });
    ended.catch(() => {}); // where `work` fails first, its error is the one that is told
    try {
      const [conversations, messages] = ["conversations", "messages"].map((name) => tableOf(transaction.objectStore(name)));
      const found = await work({ conversations, messages });
      transaction.commit?.(); // at once: the page may be left in this moment
      await ended;
      return found;
    } catch (error) {
      try { transaction.abort(); } catch { /* it has ended */ }
      const name = transaction.error?.name ?? error.name;
      throw name === "QuotaExceededError" ? new StorageFull() : error;
    }
  }

  async #open() {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: ["conversation", "id"] });
    };
    const database = await promised(request);
    database.onclose = () => { this.#database = null; }; // the browser cleared it: the next write makes a new one
    database.onversionchange = () => { database.close(); this.#database = null; };
    return database;
  }
}

// The same without a database, until the tab is closed.
export class MemoryTables {
  #conversations = new Map();
  #messages = new Map();

  async run(_mode, work) {
    const conversations = this.#table(this.#conversations, (each) => each.id);
    const messages = this.#table(this.#messages, (each) => `${each.conversation} ${each.id}`);
    return work({ conversations, messages });
  }

  #table(rows, keyOf) {
    const keyed = (key) => (Array.isArray(key) ? key.join(" ") : key);
    const of = (conversation) => [...rows.values()].filter((each) => each.conversation === conversation);
    return {
      get: (key) => rows.get(keyed(key)),
      all: () => [...rows.values()],
      of,
      after: (key) => (key ? [] : [...rows.values()]),
      put: (value) => { rows.set(keyOf(value), structuredClone(value)); },
      remove: (key) => { rows.delete(keyed(key)); },
      removeOf: (conversation) => of(conversation).forEach((each) => rows.delete(keyOf(each))),
    };
  }
}
