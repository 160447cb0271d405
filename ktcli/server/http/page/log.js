// The conversation on the page. Articles of messages that stay are kept, those far from the window show their text as it was
// written until they come near, and the end stays in view where it was.

import { MessageView } from "./messages.js";

const AT_ONCE = 8; // answers at the end that are Markdown from the start
const NEAR = "1500px"; // from the window
const END = 80; // pixels from the end that still are at the end

export class Log {
  #views = new Map(); // by the id of the message
  #conversation = null;
  #isPinned = true;

  constructor(scroller, list, toEnd, actions) {
    Object.assign(this, { scroller, list, toEnd, actions });
    this.near = new IntersectionObserver((entries) => this.#came(entries), { root: scroller, rootMargin: NEAR });
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => { if (this.#isPinned) this.goToEnd(); }).observe(list);
    toEnd.addEventListener("click", () => { this.goToEnd(); scroller.focus(); });
  }

  goToEnd() {
    this.#isPinned = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.toEnd.hidden = true;
  }

  // status: { running: the message that is being written here or null, live: ids of those in other tabs }.
  draw(conversation, status) {
    if (this.#conversation !== conversation) this.#clear(conversation);
    const path = conversation.path();
    this.#forget(new Set(path.map((each) => each.id)));
    let there = this.list.firstElementChild;
    for (const [at, message] of path.entries()) {
      const view = this.#viewOf(message);
      if (there === view.whole) there = there.nextElementSibling;
      else this.list.insertBefore(view.whole, there);
      if (at >= path.length - AT_ONCE || view.isRendered) view.render(status.running === message || status.live.has(message.id));
      else this.near.observe(view.whole);
    }
    this.#drawRows(conversation, path, status);
  }

  #drawRows(conversation, path, { running, live }) {
    const isModelShown = new Set(path.map((each) => each.model).filter(Boolean)).size > 1;
    for (const [at, message] of path.entries()) {
      const siblings = conversation.siblings(message);
      this.#views.get(message.id).drawRow({
        place: siblings.indexOf(message), count: siblings.length, isRunning: running === message, isLive: live.has(message.id),
        isLast: at === path.length - 1, isBusy: Boolean(running), isModelShown,
      });
    }
  }

  grew(message) {
    this.#views.get(message.id)?.grew();
  }

  // Shows which messages another version would take the place of.
  mark(from) {
    let isBehind = false;
    for (const article of this.list.children) {
      isBehind ||= article.dataset.id === from?.id;
      article.classList.toggle("replaced", isBehind);
    }
  }

  focusPager(message, step) {
    const buttons = [...(this.#views.get(message.id)?.row.querySelectorAll(".pager button") ?? [])];
    (buttons[step < 0 ? 0 : 1]?.disabled ? buttons.find((each) => !each.disabled) : buttons[step < 0 ? 0 : 1])?.focus();
  }

  #viewOf(message) {
    if (!this.#views.has(message.id)) this.#views.set(message.id, new MessageView(message, this.actions));
    return this.#views.get(message.id);
  }

  #clear(conversation) {
    this.near.disconnect();
    this.#views.clear();
    this.list.replaceChildren();
    this.#conversation = conversation;
    this.#isPinned = true;
  }

  #forget(wanted) {
    for (const [id, view] of this.#views) {
      if (wanted.has(id)) continue;
      view.whole.remove();
      this.#views.delete(id);
    }
  }

  #came(entries) {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      this.near.unobserve(target);
      const view = this.#views.get(target.dataset.id);
      if (view && !view.isRendered) view.render();
    }
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.#isPinned = scrollHeight - scrollTop - clientHeight < END;
    this.toEnd.hidden = this.#isPinned;
  }
}
