// Copies texts, also where a page of another machine has no access to the clipboard.

import { button, icon } from "./elements.js";

const SHOWN_MS = 2000;

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy"); // browsers keep it for pages without TLS
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("the browser does not allow it");
}

// A button that copies what `text` returns, and says so.
export function copyButton(text) {
  const made = button("Copy", async () => {
    const [said, iconName] = await copy(text()).then(() => ["Copied", "check"], () => ["Cannot copy", "close"]);
    show(said, iconName);
    setTimeout(() => show("Copy", "copy"), SHOWN_MS);
  }, "copy");
  const show = (said, iconName) => {
    made.lastElementChild.textContent = said;
    made.firstElementChild.replaceWith(icon(iconName));
  };
  return made;
}
