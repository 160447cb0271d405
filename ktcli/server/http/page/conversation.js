// A conversation: a tree of messages. A question that was edited and an answer that was retried are siblings of what was
// there before; the path that is shown takes, at each fork, the message that was chosen last. Nothing is ever replaced.
//
// A message: { conversation, id, parent, role, content, made, chosen }, and where there are any: files [{ name, text }] of a
// question, and of an answer thoughts, model, state, speed { rate, tokens, cached } and used (tokens of the context).
// state: "open" (it is being written), "stopped" (by the user), "interrupted", "length" (the limit of tokens); none: whole.

export const TITLE = "New conversation";
const TITLE_CHARS = 60;

export function newId() {
  if (crypto.randomUUID) return crypto.randomUUID(); // only where the page is secure
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const titleOf = (text) => text.replace(/\s+/g, " ").trim().slice(0, TITLE_CHARS) || TITLE;

export class Conversation {
  #messages = new Map(); // by id
  #children = new Map(); // by the id of the parent, in the order in which they were made; null: the first messages
  #last = 0; // the time of the last message: each has a later one

  // record: { id, title, made, changed, settings }, and `deleted` where it is: the times are in milliseconds.
  constructor(record, messages = []) {
    this.record = record;
    this.unsaved = new Set(); // ids of messages that there was no room for
    this.merge(messages);
  }

  static begin(settings = {}) {
    const now = Date.now();
    return new Conversation({ id: newId(), title: TITLE, made: now, changed: now, settings });
  }

  get id() { return this.record.id; }
  get isEmpty() { return !this.#messages.size; }
  get all() { return [...this.#messages.values()]; }

  get(id) { return this.#messages.get(id); }

  // The messages that are shown, from the first to the last.
  path() {
    const found = [];
    for (let next = this.#chosen(null); next; next = this.#chosen(next.id)) found.push(next);
    return found;
  }

  // A message and the others at its place, in their order.
  siblings(message) {
    return this.#children.get(this.#parentOf(message)) ?? [message];
  }

  // Adds a message behind a parent (null: at the beginning), and chooses it.
  add(parent, about) {
    const made = this.#time();
    const message = { conversation: this.id, id: newId(), parent: parent?.id ?? null, made, chosen: made, ...about };
    this.#put(message);
    return message;
  }

  // Takes out a message that nothing follows.
  drop(message) {
    this.#messages.delete(message.id);
    const siblings = this.siblings(message), at = siblings.indexOf(message);
    if (at >= 0) siblings.splice(at, 1);
  }

  choose(message) {
    message.chosen = this.#time();
  }

  // Takes over what the store has; messages that `isOurs` names stay as they are here. Returns whether anything changed.
  merge(messages, isOurs = () => false) {
    let isChanged = false;
    for (const message of [...messages].sort((one, other) => one.made - other.made)) {
      const known = this.#messages.get(message.id);
      if (!known) this.#put(message);
      else if (isOurs(known) || this.unsaved.has(known.id) || isSame(known, message)) continue;
      else Object.assign(known, { state: undefined }, message);
      isChanged = true;
    }
    return isChanged;
  }

  #chosen(parent) {
    const newer = (best, each) => (best && (best.chosen ?? 0) > (each.chosen ?? 0) ? best : each);
    return this.#children.get(parent)?.reduce(newer, null);
  }

  // A message whose parent was lost is a first one: it stays in reach.
  #parentOf(message) {
    return this.#messages.has(message.parent) ? message.parent : null;
  }

  #put(message) {
    this.#messages.set(message.id, message);
    this.#last = Math.max(this.#last, message.made, message.chosen ?? 0);
    const parent = this.#parentOf(message);
    if (!this.#children.has(parent)) this.#children.set(parent, []);
    this.#children.get(parent).push(message);
  }

  #time() {
    return (this.#last = Math.max(Date.now(), this.#last + 1));
  }
}

const isSame = (one, other) => ["content", "thoughts", "state", "chosen"].every((name) => one[name] === other[name]);
