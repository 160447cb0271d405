// Takes over the conversations that earlier versions of the page kept, all in one text.

import { TEXT_MOST, Unsound, soundConversation } from "./records.js";

const NAME = "kt.conversations";

const isMessage = (each) =>
  ["user", "assistant"].includes(each?.role) && typeof each.content === "string" && each.content.length <= TEXT_MOST;

// An earlier conversation in today's form. Its ids follow from it: two tabs that both take it over store the same.
function converted(old, newest) {
  const messages = old.messages.filter(isMessage).map(({ role, content, thoughts, used }, at) =>
    ({ id: `${at}`, parent: at ? `${at - 1}` : null, role, content, thoughts, used, made: at }));
  return soundConversation({ id: old.id, title: old.title, made: newest, changed: newest, messages });
}

// Throws what the store throws; what was kept is then still there.
export async function takeOver(store) {
  let kept;
  try {
    kept = localStorage.getItem(NAME);
  } catch { /* storage is blocked: there is nothing */ }
  if (!kept || !store.isKept) return;
  let found = null;
  try {
    found = JSON.parse(kept);
  } catch { /* it was no list of conversations */ }
  const now = Date.now();
  for (const [at, old] of (Array.isArray(found) ? found : []).entries()) {
    if (!Array.isArray(old?.messages) || !old.messages.length) continue;
    try {
      const { record, messages } = converted(old, now - at); // the newest came first
      await store.addMissing(record, messages);
    } catch (error) {
      if (!(error instanceof Unsound)) throw error;
    }
  }
  localStorage.removeItem(NAME);
}
