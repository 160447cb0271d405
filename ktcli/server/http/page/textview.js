// Shows a text of Markdown in an element, and follows it while it grows: what comes before the last block is not made anew.

import { copyButton } from "./copying.js";
import { element } from "./elements.js";
import { TEXT_MOST, blocks } from "./markdown.js";
import { styleLetters } from "./mathletters.js";
import { sanitized } from "./sanitizing.js";

const REFERENCES = /^ {0,3}\[[^\]\n]{1,200}\]:/m; // links whose addresses stand elsewhere in the text

const MANY = 100; // blocks, of which only those in view are laid out

export class TextView {
  #settled = ""; // the beginning of the text whose elements stay
  #elements = 0; // how many these are
  #env = {};
  #shown = null;

  constructor(container) {
    this.container = container;
  }

  // isOpen: whether more will follow.
  show(said, isOpen = false) {
    const text = said.includes("\r") ? said.replace(/\r\n?/g, "\n") : said;
    if (this.#shown === `${isOpen}${text}`) return;
    this.#shown = `${isOpen}${text}`;
    if (text.length > TEXT_MOST) return this.#plain(text);
    if (!text.startsWith(this.#settled) || (!isOpen && REFERENCES.test(text))) this.#forget();
    this.#env.isOpen = isOpen;
    const rest = text.slice(this.#settled.length), found = blocks(rest, this.#env, this.#elements);
    const made = sanitized(found.map((block) => block.markup).join(""));
    const isWhole = [...made.childNodes].filter((node) => node.nodeType === Node.ELEMENT_NODE).length === found.length;
    this.#clear(this.#elements);
    decorate(made);
    this.container.append(...made.children);
    this.container.classList.toggle("many", this.container.children.length > MANY);
    if (isOpen && isWhole && found.length > 1) this.#settle(rest, found);
  }

  // All blocks but the last are as they will stay.
  #settle(rest, found) {
    let end = 0;
    for (let line = found.at(-1).line; line > 0; line--) end = rest.indexOf("\n", end) + 1;
    this.#settled += rest.slice(0, end);
    this.#elements += found.length - 1;
  }

  #forget() {
    this.#settled = "";
    this.#elements = 0;
    this.#env = {};
  }

  #clear(from) {
    if (!from) return this.container.replaceChildren();
    while (this.container.children.length > from) this.container.lastElementChild.remove();
  }

  #plain(text) {
    this.#forget();
    const [only] = this.container.children;
    if (this.container.children.length !== 1 || only.className !== "plain") {
      this.container.replaceChildren(element("div", { className: "plain" }));
    }
    const node = this.container.firstElementChild;
    if (text.startsWith(node.textContent)) node.append(text.slice(node.textContent.length));
    else node.textContent = text;
  }
}

// What scrolls can be reached with the keyboard, and code can be copied.
function decorate(made) {
  styleLetters(made);
  for (const pre of made.querySelectorAll("pre")) {
    const language = pre.title;
    pre.removeAttribute("title");
    pre.tabIndex = 0;
    pre.setAttribute("role", "group");
    pre.setAttribute("aria-label", language ? `Code in ${language}` : "Code");
    const title = element("span", { textContent: language || "code" });
    const head = element("div", { className: "codehead" }, title, copyButton(() => pre.textContent));
    const whole = element("div", { className: "codeblock" });
    pre.replaceWith(whole);
    whole.append(head, pre);
  }
  for (const wide of made.querySelectorAll(".wide, div.formula")) {
    wide.tabIndex = 0;
    wide.setAttribute("role", "group");
    wide.setAttribute("aria-label", wide.className === "wide" ? "Table" : "Formula");
  }
}
