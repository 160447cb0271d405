// The models that the server has, and the one that answers.

import { models } from "./api.js";
import { inBrowser } from "./preferences.js";

export class Models {
  #known = new Map(); // by name

  constructor(picker, changed, failed) {
    Object.assign(this, { picker, changed, failed });
    picker.addEventListener("change", () => { inBrowser("model", picker.value); changed(); });
  }

  get chosen() { return this.picker.value; }

  // Tokens that the chosen model holds, where that is known.
  get context() { return this.#known.get(this.picker.value)?.max_model_len; }

  async load() {
    try {
      const rows = await models();
      this.#known = new Map(rows.map((row) => [row.id, row]));
      this.picker.replaceChildren(...rows.map((row) => new Option(row.id, row.id)));
      const last = inBrowser("model");
      if (this.#known.has(last)) this.picker.value = last;
      this.changed();
    } catch (error) {
      this.failed(error);
    }
  }
}
