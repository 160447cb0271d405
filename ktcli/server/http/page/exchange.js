// Export and import of conversations as a JSON file.

import { Unsound, soundConversation } from "./records.js";

const FORMAT = "kt-conversations", VERSION = 1;
export const FILE_BYTES = 64 * 1024 * 1024; // read at once
const CONVERSATIONS_MOST = 10_000;

const MESSAGE_FIELDS = ["id", "parent", "role", "content", "made", "chosen", "files", "thoughts", "model", "state", "speed", "used"];

// A file with conversations. messagesOf: returns those of an id.
export async function exported(records, messagesOf) {
  const parts = [`{"format": "${FORMAT}", "version": ${VERSION}, "exported": "${new Date().toISOString()}", "conversations": [`];
  for (const { id, title, made, changed, settings } of records) {
    const messages = ordered(await messagesOf(id));
    parts.push(parts.length > 1 ? ",\n" : "\n", JSON.stringify({ id, title, made, changed, settings, messages }));
  }
  return new Blob([...parts, "\n]}\n"], { type: "application/json" });
}

// The messages of a conversation, each behind its parent: what an import asks for.
function ordered(messages) {
  const there = new Set(messages.map((each) => each.id));
  return [...messages].sort((one, other) => one.made - other.made)
    .map((each) => Object.fromEntries(MESSAGE_FIELDS.filter((name) => each[name] !== undefined).map((name) => [name, each[name]])))
    .map((each) => (there.has(each.parent) ? each : { ...each, parent: null }));
}

// The conversations of a file. Throws `Unsound` with a sentence.
export async function read(file) {
  if (file.size > FILE_BYTES) throw new Unsound(`${file.name} is larger than ${FILE_BYTES / 1024 / 1024} MiB.`);
  let said;
  try {
    said = JSON.parse(await file.text());
  } catch {
    throw new Unsound(`${file.name} is not valid JSON.`);
  }
  if (said?.format !== FORMAT) throw new Unsound(`${file.name} was not exported from this page.`);
  if (said.version !== VERSION) throw new Unsound(`${file.name} has a version that this page does not support.`);
  const rows = said.conversations;
  if (!Array.isArray(rows) || rows.length > CONVERSATIONS_MOST) {
    throw new Unsound(`${file.name} must contain a list of at most ${CONVERSATIONS_MOST.toLocaleString("en")} conversations.`);
  }
  try {
    return rows.map(soundConversation);
  } catch (error) {
    throw error instanceof Unsound ? new Unsound(`${file.name} cannot be imported: ${error.message}.`) : error;
  }
}

// Adds the conversations of a file to the store; nothing that is there is overwritten. Returns a sentence.
export async function importInto(store, file) {
  const found = await read(file);
  let added = 0;
  for (const { record, messages } of found) added += await store.addMissing(record, messages);
  const here = found.length - added;
  const counted = `Imported ${added} conversation${added === 1 ? "" : "s"}`;
  return here ? `${counted}; ${here} ${here === 1 ? "was" : "were"} already here.` : `${counted}.`;
}

// Lets the browser save a file.
export function download(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
