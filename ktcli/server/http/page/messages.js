// The messages of a conversation as articles: their texts, their files and thoughts, and what can be done with each.

import { withFiles } from "./attachments.js";
import { copyButton } from "./copying.js";
import { button, element, iconButton } from "./elements.js";
import { TextView } from "./textview.js";

const STATES = { open: "Interrupted", interrupted: "Interrupted", stopped: "Stopped", length: "Reached the token limit" };
const SHARE = 4; // an answer is drawn again after this many times what drawing it took: typing stays fluent

function speedOf({ speed, model }, isModelShown) {
  const cached = speed?.cached ? `, ${speed.cached.toLocaleString("en")} from cache` : "";
  const words = speed ? `${speed.rate.toFixed(1)} tokens/s · ${speed.tokens.toLocaleString("en")} tokens${cached}` : "";
  return [isModelShown ? model : "", words].filter(Boolean).join(" · ");
}

export class MessageView {
  #signature = null;
  #next = 0; // when an answer that grows is drawn again, in milliseconds
  #timer = 0;

  // actions: edit, retry, goOn, choose.
  constructor(message, actions) {
    Object.assign(this, { message, actions, isRendered: false });
    this.isOwn = message.role === "user";
    this.text = element("div", { className: "text" });
    this.row = element("div", { className: "row" });
    this.whole = element("article", { className: this.isOwn ? "own" : "other", aria: { label: this.isOwn ? "You" : "Answer" } });
    this.whole.dataset.id = message.id;
    if (this.isOwn) this.#buildOwn();
    else this.#buildAnswer();
    this.whole.append(this.row);
  }

  #buildOwn() {
    this.isRendered = true;
    this.text.textContent = this.message.content;
    this.whole.append(...(this.message.content ? [this.text] : []), ...(this.message.files ?? []).map(fileView));
  }

  #buildAnswer() {
    this.view = new TextView(this.text);
    this.thoughts = element("div", { className: "thoughts" });
    this.summary = element("summary", { textContent: "Thoughts" });
    this.folded = element("details", { hidden: true }, this.summary, this.thoughts);
    this.whole.append(this.folded, this.text);
    this.text.textContent = this.message.content; // until it is near the window
  }

  // Shows the text as Markdown.
  render(isOpen = false) {
    this.isRendered = true;
    const { message } = this;
    if (this.isOwn) return;
    this.view.show(message.content, isOpen);
    const thoughts = message.thoughts ?? "", shown = this.thoughts.textContent;
    this.folded.hidden = !thoughts;
    this.summary.textContent = isOpen && !message.content ? "Thinking …" : "Thoughts";
    if (thoughts.startsWith(shown)) this.thoughts.append(thoughts.slice(shown.length));
    else this.thoughts.textContent = thoughts;
    this.whole.classList.toggle("waiting", isOpen && !message.content && !thoughts);
  }

  // Draws an answer that grew: soon, and not so often that nothing else gets done.
  grew() {
    if (this.#timer) return;
    const wait = Math.max(0, this.#next - performance.now());
    this.#timer = setTimeout(() => requestAnimationFrame(() => {
      const begun = performance.now();
      if (this.whole.isConnected && this.isGrowing) this.render(true);
      setTimeout(() => { // the browser has laid it out and painted it meanwhile
        this.#timer = 0;
        this.#next = performance.now() + SHARE * (performance.now() - begun);
      });
    }), wait);
  }

  // what: { place, count } among the siblings, isRunning, isLive (in another tab), isLast, isBusy (the conversation is),
  // isModelShown.
  drawRow(what) {
    const { message } = this;
    const signature = JSON.stringify([what, message.state, message.speed, message.model, !message.content]);
    if (signature === this.#signature) return;
    this.#signature = signature;
    this.isGrowing = what.isRunning;
    this.row.hidden = what.isRunning;
    this.row.replaceChildren(...this.#pager(what), ...(this.isOwn ? this.#ownButtons(what) : this.#answerButtons(what)));
  }

  #pager({ place, count, isBusy }) {
    if (count < 2) return [];
    const turn = (iconName, name, step) => {
      const made = iconButton(iconName, name, () => this.actions.choose(this.message, step));
      made.disabled = isBusy || place + step < 0 || place + step >= count;
      return made;
    };
    const aria = { role: "img", label: `Version ${place + 1} of ${count}` };
    const words = element("span", { textContent: `${place + 1}/${count}`, aria });
    return [element("span", { className: "pager" }, turn("previous", "Previous version", -1), words, turn("next", "Next version", 1))];
  }

  #ownButtons({ isLast, isBusy }) {
    const { message, actions } = this;
    const made = [copyButton(() => withFiles(message.content, message.files)), button("Edit", () => actions.edit(message), "edit")];
    if (isLast && !isBusy) {
      const state = element("span", { className: "state", textContent: "Not answered" });
      made.push(button("Retry", () => actions.retry(message), "retry"), state);
    }
    return made;
  }

  #answerButtons({ isLast, isLive, isBusy, isModelShown }) {
    const { message, actions } = this;
    const made = [copyButton(() => message.content)];
    const isFree = !isBusy && !isLive;
    if (isFree) made.push(button("Retry", () => actions.retry(message), "retry"));
    if (isFree && isLast && message.state && message.content) made.push(button("Continue", () => actions.goOn(message), "goOn"));
    const state = isLive ? "Being written in another tab" : STATES[message.state];
    if (state) made.push(element("span", { className: "state", textContent: state }));
    made.push(element("span", { className: "speed", textContent: speedOf(message, isModelShown) }));
    return made;
  }
}

// A file that went along with a question; its text is there when it is opened.
function fileView({ name, text }) {
  const pre = element("pre", { tabIndex: 0, aria: { role: "group", label: name } });
  const made = element("details", { className: "file" }, element("summary", { textContent: name }), pre);
  made.addEventListener("toggle", () => { pre.textContent ||= text; }, { once: true });
  return made;
}
