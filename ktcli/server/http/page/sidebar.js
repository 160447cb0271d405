// The list of conversations: those that are kept, found by their words, and those that were deleted and can come back.

import { button, element, iconButton } from "./elements.js";

const DAY_MS = 86_400_000;
const SEARCH_MS = 200; // after the last key

function ageOf(changed, now) {
  const today = new Date(now).setHours(0, 0, 0, 0);
  if (changed >= today) return "Today";
  if (changed >= today - DAY_MS) return "Yesterday";
  return changed >= today - 7 * DAY_MS ? "Previous 7 days" : "Older";
}

export class Sidebar {
  #found = null; // ids of conversations with the words that are looked for; null: all
  #words = "";
  #timer = 0;
  #signature = ""; // what is shown: nothing is made anew, and no focus lost, where it stays the same

  // parts: the elements `list`, `search`, `deleted`, `note`; actions: open, remove, restore, erase, find.
  constructor(parts, actions) {
    Object.assign(this, { ...parts, actions, state: null });
    this.search.addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#look(), SEARCH_MS);
    });
  }

  async #look() {
    const words = this.search.value.trim();
    this.#words = words;
    const found = words ? await this.actions.find(words) : null;
    if (words !== this.#words) return; // another search has begun meanwhile
    this.#found = found;
    this.draw(this.state);
  }

  // state: { records, current: an id, running: ids of those with an answer that is being written }.
  draw(state) {
    this.state = state;
    const kept = state.records.filter((each) => !each.deleted);
    const words = this.#words.toLowerCase();
    const shown = kept.filter((each) => !this.#found || this.#found.has(each.id) || each.title.toLowerCase().includes(words));
    this.note.textContent = this.#found ? (shown.length ? `${shown.length} found` : "Nothing found") : "";
    const rows = state.records.map(({ id, title, deleted, changed }) => [id, title, deleted, ageOf(changed, Date.now())]);
    const signature = JSON.stringify([state.current, [...state.running.keys()], rows, shown.map(({ id }) => id)]);
    if (signature === this.#signature) return;
    this.#signature = signature;
    this.#keepingFocus(() => this.list.replaceChildren(...this.#groups(shown)));
    this.#drawDeleted(state.records.filter((each) => each.deleted));
  }

  // What had the focus has it again, where there still is such a button.
  #keepingFocus(draw) {
    const { id } = this.list.contains(document.activeElement) ? document.activeElement.dataset : {};
    draw();
    if (id) [...this.list.querySelectorAll("button")].find((each) => each.dataset.id === id)?.focus();
  }

  #groups(records) {
    const now = Date.now(), groups = new Map();
    for (const record of records) {
      const age = ageOf(record.changed, now);
      if (!groups.has(age)) groups.set(age, element("ul", { aria: { label: age } }));
      groups.get(age).append(this.#item(record));
    }
    return [...groups].flatMap(([age, list]) => [element("p", { className: "age", textContent: age, aria: { hidden: "true" } }), list]);
  }

  #item(record) {
    const isOpen = record.id === this.state.current;
    const open = button(record.title, () => this.actions.open(record.id));
    open.className = "open";
    open.title = record.title;
    open.dataset.id = `open ${record.id}`;
    if (isOpen) open.setAttribute("aria-current", "true");
    if (this.state.running.has(record.id)) {
      open.append(element("span", { className: "running", title: "Answering", aria: { role: "img", label: "Answering" } }));
    }
    const remove = iconButton("remove", `Delete ${record.title}`, () => this.actions.remove(record.id));
    remove.dataset.id = `remove ${record.id}`;
    return element("li", {}, open, remove);
  }

  #drawDeleted(records) {
    this.deleted.hidden = !records.length;
    this.deleted.querySelector("summary").textContent = `Recently deleted (${records.length})`;
    this.deleted.querySelector("ul").replaceChildren(...records.map((record) => element("li", {},
      element("span", { className: "title", textContent: record.title }),
      iconButton("restore", `Restore ${record.title}`, () => this.actions.restore(record.id)),
      iconButton("remove", `Delete ${record.title} permanently`, () => this.actions.erase(record.id)))));
  }
}
