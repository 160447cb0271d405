// The conversations, kept in this browser.

const NAME = "kt.conversations";

const isMessage = (each) => ["user", "assistant"].includes(each?.role) && typeof each.content === "string";
const isSound = (each) => typeof each?.id === "string" && typeof each.title === "string" && Array.isArray(each.messages) && each.messages.every(isMessage);

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME));
    return Array.isArray(found) ? found.filter(isSound) : [];
  } catch {
    return [];
  }
}

// Keeps them; returns whether there was room for all. The conversations of other tabs stay.
export function save(conversations, gone = []) {
  const here = new Set([...conversations.map((each) => each.id), ...gone]);
  const all = [...conversations, ...load().filter((each) => !here.has(each.id))];
  try {
    localStorage.setItem(NAME, JSON.stringify(all.filter((each) => each.messages.length)));
    return true;
  } catch {
    return false;
  }
}

export const begin = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "New conversation", messages: [] });
