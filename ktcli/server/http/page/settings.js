// The dialog with the settings of a conversation: its title, the system text, and how answers are sampled.

import { element } from "./elements.js";
import { SAMPLING } from "./sampling.js";

function fieldOf({ name, label, least, most, isWhole, hint }) {
  const [step, inputMode] = isWhole ? [1, "numeric"] : ["any", "decimal"];
  const bounds = { type: "number", min: least, max: most, step, inputMode };
  const input = element("input", { ...bounds, id: `set-${name}`, name, placeholder: "default", aria: { describedby: `hint-${name}` } });
  return element("div", { className: "field" },
    element("label", { htmlFor: input.id, textContent: label }), input, element("small", { id: `hint-${name}`, textContent: hint }));
}

export class SettingsDialog {
  #done = null;

  constructor(dialog) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    dialog.querySelector(".sampling").append(...SAMPLING.map(fieldOf));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault(); // an Enter in a field would press Cancel, which comes first
      this.#finish(this.#read());
    });
    dialog.querySelector(".cancel").addEventListener("click", () => this.#finish(null));
    dialog.addEventListener("close", () => this.#finish(null));
  }

  // Returns { title, settings, isDefault }, or null where it was cancelled.
  ask(title, settings) {
    const { elements } = this.form;
    elements.title.value = title;
    elements.system.value = settings.system ?? "";
    for (const { name } of SAMPLING) elements[name].value = settings[name] ?? "";
    elements.isDefault.checked = false;
    this.dialog.showModal();
    return new Promise((done) => { this.#done = done; });
  }

  #read() {
    const { elements } = this.form, settings = {};
    if (elements.system.value.trim()) settings.system = elements.system.value;
    for (const { name } of SAMPLING) if (elements[name].value !== "") settings[name] = elements[name].valueAsNumber;
    return { title: elements.title.value.trim(), settings, isDefault: elements.isDefault.checked };
  }

  #finish(said) {
    const done = this.#done;
    this.#done = null;
    if (this.dialog.open) this.dialog.close();
    done?.(said);
  }
}
