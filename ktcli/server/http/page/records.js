// Checks conversations that come from outside: from a file, or from where an earlier page kept them. A record is built anew
// of the fields that are known; whatever else an object has is left out.

import { SAMPLING } from "./sampling.js";

export const TEXT_MOST = 4_000_000; // characters of a message
export const MESSAGES_MOST = 20_000; // of a conversation
const FILES_MOST = 100;
const LATEST = 8.64e15; // milliseconds: what a Date can hold
const STATES = ["open", "stopped", "interrupted", "length"];
const ID = /^[\w.-]{1,64}$/;

export class Unsound extends Error {}

function require(is, what) {
  if (!is) throw new Unsound(what);
}

const isText = (value, most = TEXT_MOST) => typeof value === "string" && value.length <= most;
const isNumber = (value, most = LATEST) => typeof value === "number" && value >= 0 && value <= most;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

// The settings of an object that are of the right kind.
export function soundSettings(said) {
  const found = {};
  if (!isObject(said)) return found;
  if (isText(said.system, 1_000_000) && said.system) found.system = said.system;
  for (const { name, least, most, isWhole } of SAMPLING) {
    const value = said[name];
    if (typeof value === "number" && value >= least && value <= most && (!isWhole || Number.isInteger(value))) found[name] = value;
  }
  return found;
}

function soundMessage(said, conversation, known) {
  require(isObject(said), "a message is not an object");
  require(typeof said.id === "string" && ID.test(said.id) && !known.has(said.id), "a message has no id of its own");
  require(said.parent === null || known.has(said.parent), `message ${said.id} does not follow an earlier one`);
  require(said.role === "user" || said.role === "assistant", `message ${said.id} is neither a question nor an answer`);
  require(isText(said.content), `message ${said.id} has no text, or one that is too long`);
  const { id, parent, role, content } = said, found = { conversation, id, parent, role, content };
  found.made = isNumber(said.made) ? said.made : known.size;
  found.chosen = isNumber(said.chosen) ? said.chosen : found.made;
  if (isText(said.thoughts) && said.thoughts) found.thoughts = said.thoughts;
  if (isText(said.model, 500)) found.model = said.model;
  if (STATES.includes(said.state)) found.state = said.state;
  if (isNumber(said.used)) found.used = said.used;
  if (isObject(said.speed) && ["rate", "tokens", "cached"].every((name) => isNumber(said.speed[name]))) {
    found.speed = { rate: said.speed.rate, tokens: said.speed.tokens, cached: said.speed.cached };
  }
  if (said.files !== undefined) found.files = soundFiles(said.files, id);
  return found;
}

function soundFiles(said, id) {
  require(Array.isArray(said) && said.length <= FILES_MOST, `message ${id} has files in an unknown form`);
  return said.map((each) => {
    require(isObject(each) && isText(each.name, 500) && isText(each.text), `message ${id} has a file without a name or text`);
    return { name: each.name, text: each.text };
  });
}

// Returns { record, messages }.
export function soundConversation(said) {
  require(isObject(said), "a conversation is not an object");
  require(typeof said.id === "string" && ID.test(said.id), "a conversation has no id");
  require(isText(said.title, 1000), `conversation ${said.id} has no title`);
  require(Array.isArray(said.messages), `conversation ${said.id} has no messages`);
  require(said.messages.length <= MESSAGES_MOST, `conversation ${said.id} has more than ${MESSAGES_MOST.toLocaleString("en")} messages`);
  const known = new Map();
  for (const each of said.messages) {
    const message = soundMessage(each, said.id, known);
    known.set(message.id, message);
  }
  const made = isNumber(said.made) ? said.made : Date.now();
  const changed = isNumber(said.changed) ? said.changed : made, settings = soundSettings(said.settings);
  return { record: { id: said.id, title: said.title, made, changed, settings }, messages: [...known.values()] };
}
