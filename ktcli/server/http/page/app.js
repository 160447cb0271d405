// The chat page: starts it, and says what its buttons and keys do.

import { COMPLETE } from "./answering.js";
import { Attachments } from "./attachments.js";
import { Conversations } from "./conversations.js";
import { download, exported, importInto } from "./exchange.js";
import { takeOver } from "./legacy.js";
import { Log } from "./log.js";
import { Models } from "./models.js";
import { remember } from "./api.js";
import { inBrowser, inSession } from "./preferences.js";
import { SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { StorageFull } from "./tables.js";
import { listen } from "./tabs.js";
import { Unsound } from "./records.js";

const at = (id) => document.getElementById(id);
const prompt = at("prompt"), side = at("side");
let editing = null; // what is being edited: { message, draft: what was written before, files }
let undo = null;

// --- what is said -----------------------------------------------------------------------------------------

// Says what happened; `back` takes it back.
function say(words, isWrong = false, back = null) {
  at("status").textContent = words;
  at("status").classList.toggle("wrong", isWrong);
  at("status").classList.toggle("quiet", words === COMPLETE); // for readers; others see it
  undo = back;
  at("undo").hidden = !back;
}

const FULL = "The browser's storage is full. New messages are kept only until this tab is closed: delete some conversations, or export this one.";
const BLOCKED = "The browser does not let this page store anything: conversations last until this tab is closed.";

// Says what is wrong with the storage, until it is right again.
function warn(words) {
  at("warning").textContent = words;
  at("warning").hidden = !words;
}

const failed = (error) => warn(error instanceof StorageFull ? FULL : `The browser cannot store conversations: ${error?.message ?? error}`);
const saved = () => { if (store.isKept) warn(""); };

// --- the conversation -------------------------------------------------------------------------------------

const lastOpen = inSession("open");
const store = await Store.open();
const models = new Models(at("model"), drawContext, (error) => {
  if (error.status === 401) needsKey();
  else say(`Cannot reach the server: ${error.message}`, true);
});
const conversations = new Conversations(store, {
  draw, say, failed, saved, needsKey, grew: (message) => log.grew(message), model: () => models.chosen,
});
const log = new Log(at("log"), at("messages"), at("end"), {
  edit,
  retry: (message) => { endEdit(); conversations.retry(message); },
  goOn: (message) => { endEdit(); conversations.goOn(message); },
  choose(message, step) {
    endEdit();
    log.focusPager(conversations.choose(message, step), step);
  },
});
const sidebar = new Sidebar({ list: at("conversations"), search: at("search"), deleted: at("deleted"), note: at("found") }, {
  open: turnTo,
  remove,
  restore: (id) => conversations.restore(id),
  erase: (id) => conversations.erase(id),
  find: (words) => store.search(words).catch(() => new Set()),
});
const attachments = new Attachments(at("files"), () => {});
const settings = new SettingsDialog(at("adjust"));

function draw() {
  const { current, running } = conversations;
  const title = current.record.title, isRunning = running.has(current.id);
  if (at("title").textContent !== title) at("title").textContent = title;
  document.title = current.isEmpty ? "kt" : `${title} – kt`;
  at("empty").hidden = !current.isEmpty;
  log.draw(current, { running: running.get(current.id)?.message ?? null, live: conversations.live });
  log.mark(editing?.message);
  at("cancel").hidden = !editing;
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
  at("log").setAttribute("aria-busy", String(isRunning));
  sidebar.draw({ records: conversations.records, current: current.id, running });
  inSession("open", current.id);
  drawContext();
}

function drawContext() {
  const most = models.context, used = conversations.current.path().findLast((each) => each.used)?.used;
  const words = (number) => number.toLocaleString("en");
  at("context").textContent = most ? `${words(used ?? 0)} of ${words(most)} tokens` : "";
}

async function turnTo(id) {
  endEdit();
  closeSide();
  say("");
  await conversations.open(id);
  log.goToEnd();
  prompt.focus();
}

function begin() {
  endEdit();
  closeSide();
  say("");
  conversations.begin();
  prompt.focus();
}

async function remove(id) {
  if (id === conversations.current.id) endEdit();
  const record = await conversations.remove(id);
  if (record) say(`Deleted “${record.title}”.`, false, () => conversations.restore(id, true));
  at("fresh").focus();
}

// --- the message that is written --------------------------------------------------------------------------

function compose(text, files) {
  prompt.value = text;
  attachments.set(files);
  grow();
  inSession("draft", text);
  prompt.focus();
}

// Lets a question be changed: it and all behind it stay, and what is sent becomes another version beside it.
function edit(message) {
  endEdit();
  setEditing({ message, draft: prompt.value, files: attachments.files });
  compose(message.content, message.files ?? []);
  say("Sending creates another version of this message and keeps the current one. Escape cancels.");
  draw();
}

// Begins or ends an edit, which outlives a reload.
function setEditing(what) {
  editing = what;
  inSession("editing", JSON.stringify(what && { id: what.message.id, draft: what.draft }));
}

// Goes on with an edit in which the page was left.
function resumeEdit() {
  const { id, draft } = JSON.parse(inSession("editing")) ?? {};
  const message = conversations.current.get(id), text = inSession("draft");
  if (!message) return;
  compose(draft, []);
  edit(message);
  compose(text, message.files ?? []);
}

function endEdit() {
  if (!editing) return;
  const { draft, files } = editing;
  setEditing(null);
  compose(draft, files);
  say("");
  draw();
}

function send() {
  const text = prompt.value.trim(), { files } = attachments;
  if ((!text && !files.length) || conversations.isRunning) return;
  const { message, draft, files: before } = editing ?? { message: null, draft: "", files: [] };
  setEditing(null);
  compose(draft, before);
  conversations.ask(text, files, message);
  log.goToEnd();
}

async function attach(files) {
  const wrong = await attachments.add(files);
  say(wrong.join(" "), wrong.length > 0);
  prompt.focus();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

// --- dialogs, files, theme --------------------------------------------------------------------------------

function needsKey() {
  if (!at("ask").open) at("ask").showModal();
}

async function adjust() {
  const { current } = conversations;
  const said = await settings.ask(current.record.title, current.record.settings);
  if (said) await conversations.change(current, { title: said.title || current.record.title, settings: said.settings });
  if (said?.isDefault) conversations.defaults = said.settings;
}

const day = () => new Date().toISOString().slice(0, 10);

async function exportTo(name, ids = null) {
  try {
    const records = conversations.records.filter((each) => (ids ? ids.includes(each.id) : !each.deleted));
    download(await exported(records, (id) => conversations.messages(id)), `${name}-${day()}.json`);
  } catch (error) {
    failed(error);
  }
}

async function importFrom(file) {
  try {
    say(await importInto(store, file));
  } catch (error) {
    if (error instanceof Unsound) say(error.message, true);
    else failed(error);
  }
  await conversations.reread();
}

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function otherTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (isDark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  inBrowser("theme", next);
  dress(next);
}

function openSide() {
  at("menu").setAttribute("aria-expanded", String(side.classList.toggle("open")));
}

function closeSide() {
  side.classList.remove("open");
  at("menu").setAttribute("aria-expanded", "false");
}

// --- buttons and keys -------------------------------------------------------------------------------------

const pressed = (id, run) => at(id).addEventListener("click", run);

pressed("stop", () => conversations.stop());
pressed("cancel", endEdit);
pressed("fresh", begin);
pressed("theme", otherTheme);
pressed("menu", openSide);
pressed("settings", adjust);
pressed("attach", () => at("attached").click());
pressed("import", () => at("imported").click());
pressed("export", () => exportTo("kt-conversations"));
pressed("undo", () => { const back = undo; say(""); back?.(); });
at("adjust").querySelector(".one").addEventListener("click", () => exportTo("kt-conversation", [conversations.current.id]));
at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("ask").addEventListener("close", () => { remember(at("key").value); at("key").value = ""; models.load(); });
at("attached").addEventListener("change", ({ target }) => { const files = [...target.files]; target.value = ""; attach(files); });
at("imported").addEventListener("change", ({ target }) => { const [file] = target.files; target.value = ""; if (file) importFrom(file); });
prompt.addEventListener("input", () => { grow(); inSession("draft", prompt.value); });
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) {
    if (editing) endEdit();
    else if (side.classList.contains("open")) { closeSide(); at("menu").focus(); }
    else conversations.stop();
  }
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); begin(); }
});
document.addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
document.addEventListener("visibilitychange", () => conversations.saveRunning());
addEventListener("pagehide", () => conversations.leave());

// --- the start --------------------------------------------------------------------------------------------

dress(inBrowser("theme"));
listen(conversations.handlers);
draw();
models.load();
try {
  await takeOver(store);
} catch (error) {
  failed(error);
}
await conversations.start(lastOpen);
log.goToEnd();
if (!prompt.value) compose(inSession("draft") ?? "", []);
resumeEdit();
if (!store.isKept) warn(BLOCKED);
document.documentElement.dataset.ready = "yes"; // for what waits until the page can be used
