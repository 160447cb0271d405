// Text files that go along with a question.

import { element, iconButton } from "./elements.js";

export const FILE_BYTES = 1024 * 1024;
const FILES_MOST = 20;

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 1024 * 1024 ? `${Math.round(bytes / 1024)} KiB` : `${(bytes / 1024 / 1024).toFixed(1)} MiB`;
}

// The text of a file. Throws an Error with a sentence.
async function textOf(file) {
  if (file.size > FILE_BYTES) {
    throw new Error(`${file.name} is too large (${size(file.size)}): text files may have up to ${size(FILE_BYTES)}.`);
  }
  const bytes = new Uint8Array(await file.arrayBuffer());
  const encoding = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
  let text = null;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch { /* it is no text */ }
  if (text === null || text.includes("\0")) throw new Error(`${file.name} is not a text file, and only text can be attached.`);
  return text;
}

// The text of a question with its files, each in a block of code whose fence the file cannot close.
export function withFiles(content, files = []) {
  const blocks = files.map(({ name, text }) => {
    const longest = (text.match(/`{3,}/g) ?? []).reduce((most, ticks) => Math.max(most, ticks.length), 2);
    const fence = "`".repeat(longest + 1);
    return `${name.replace(/[`\r\n]/g, " ")}:\n\n${fence}${languageOf(name)}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}

const languageOf = (name) => /\.([a-z0-9]{1,10})$/i.exec(name)?.[1].toLowerCase() ?? "";

// The files of the question that is being written, shown in `list`.
export class Attachments {
  files = [];

  constructor(list, changed) {
    this.list = list;
    this.changed = changed;
  }

  // Returns sentences about files that cannot be attached.
  async add(chosen) {
    const wrong = [];
    for (const file of chosen) {
      if (this.files.length >= FILES_MOST) {
        wrong.push(`No more than ${FILES_MOST} files can be attached to a message.`);
        break;
      }
      try {
        this.files.push({ name: file.name.slice(-200), text: await textOf(file) });
      } catch (error) {
        wrong.push(error.message);
      }
    }
    this.draw();
    return wrong;
  }

  set(files) {
    this.files = [...files];
    this.draw();
  }

  draw() {
    this.list.hidden = !this.files.length;
    this.list.replaceChildren(...this.files.map((file) => element("li", {},
      element("span", { textContent: file.name }),
      element("span", { className: "dim", textContent: size(new Blob([file.text]).size) }),
      iconButton("close", `Remove ${file.name}`, () => this.set(this.files.filter((each) => each !== file))))));
    this.changed();
  }
}
