// The chat page: what is shown, and what buttons and keys do.

import { Refused, answer, models, remember } from "./api.js";
import { show } from "./markdown.js";
import { begin, load, save } from "./store.js";

const at = (id) => document.getElementById(id);
const log = at("log"), prompt = at("prompt"), picker = at("model"), side = at("side");

let conversations = load();
let current = begin();
let known = new Map(); // the models by their names
let running = null; // the answer that comes: { message, view, stop }
let editing = null; // the message that what is typed will replace, and what was typed before: { message, draft }
const gone = []; // ids of conversations that were deleted here

// --- parts of the page ---------------------------------------------------------------------------------

function element(name, about = {}, ...children) {
  const made = Object.assign(document.createElement(name), about);
  made.append(...children);
  return made;
}

const button = (text, label, run) => {
  const made = element("button", { type: "button", textContent: text, onclick: run });
  made.setAttribute("aria-label", label);
  return made;
};

const say = (text, wrong = false) => {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
};

// The elements of a message, which `draw` fills.
function viewOf(message) {
  const own = message.role === "user", text = element("div", { className: "text" });
  const thoughts = element("div", { className: "thoughts" }), row = element("div", { className: "row" });
  const folded = element("details", {}, element("summary", { textContent: "Thoughts" }), thoughts);
  const figures = element("span");
  const whole = element("article", { className: own ? "own" : "other" }, folded, text, row);
  whole.setAttribute("aria-label", own ? "You" : "Answer");
  if (own) row.append(button("Edit", "Edit this message", () => edit(message)));
  else row.append(element("span", { className: "last" }, button("Retry", "Answer again", () => retry(message))), figures);
  const view = { message, whole, text, thoughts, folded, figures, row };
  draw(view);
  return view;
}

function draw(view) {
  const { message } = view;
  if (message.role === "user") view.text.textContent = message.content;
  else show(view.text, message.content);
  view.folded.hidden = !message.thoughts;
  if (view.thoughts.textContent !== (message.thoughts ?? "")) view.thoughts.textContent = message.thoughts ?? "";
  view.figures.textContent = message.figures ?? "";
  view.row.hidden = running?.message === message;
}

function drawAll() {
  log.replaceChildren(...current.messages.map((message) => viewOf(message).whole));
  log.scrollTop = log.scrollHeight;
  drawEditing();
  drawSide();
  drawContext();
}

// Shows what sending will replace.
function drawEditing() {
  const from = editing ? current.messages.indexOf(editing.message) : Infinity;
  [...log.children].forEach((whole, place) => whole.classList.toggle("replaced", place >= from));
  at("cancel").hidden = !editing;
}

function drawSide() {
  at("conversations").replaceChildren(...conversations.map((each) => {
    const open = button(each.title, each.title, () => turnTo(each));
    open.setAttribute("aria-current", String(each === current));
    return element("li", {}, open, button("✕", `Delete ${each.title}`, () => remove(each)));
  }));
}

function drawContext() {
  const most = known.get(picker.value)?.max_model_len, used = current.messages.at(-1)?.used;
  const words = (number) => number.toLocaleString("en");
  at("context").textContent = most ? `${words(used ?? 0)} of ${words(most)} tokens` : "";
}

// --- conversations --------------------------------------------------------------------------------------

// Puts a conversation first and keeps all.
function keep(conversation) {
  conversations = [conversation, ...conversations.filter((each) => each !== conversation)];
  if (!save(conversations, gone)) say("The browser's storage is full: delete some conversations.", true);
  drawSide();
}

function turnTo(conversation) {
  running?.stop();
  endEdit();
  current = conversation;
  side.classList.remove("open");
  at("menu").setAttribute("aria-expanded", "false");
  say("");
  drawAll();
  prompt.focus();
}

function remove(conversation) {
  gone.push(conversation.id);
  if (conversation === current) turnTo(begin());
  conversations = conversations.filter((each) => each !== conversation);
  save(conversations, gone);
  drawSide();
}

// Lets a message be changed: it and all behind it stay, here and in the browser, until another one is answered.
function edit(message) {
  endEdit();
  editing = { message, draft: prompt.value };
  compose(message.content);
  drawEditing();
  say("Sending replaces this message and all that follow; Escape cancels.");
}

function endEdit() {
  if (!editing) return;
  compose(editing.draft);
  editing = null;
  drawEditing();
  say("");
}

function compose(text) {
  prompt.value = text;
  grow();
  prompt.focus();
}

// Takes the messages from a place on out of the conversation. Until there is a new answer they can come back.
function setAside(from, text = "") {
  return { from, text, title: current.title, messages: current.messages.splice(from) };
}

function bringBack(conversation, { from, text, title, messages }) {
  conversation.messages.splice(from, Infinity, ...messages);
  conversation.title = title;
  if (conversation !== current) return;
  if (editing) {
    if (!current.messages.includes(editing.message)) editing.message = messages[0];
  } else if (text && !prompt.value) {
    editing = { message: messages[0], draft: "" };
    compose(text);
  }
}

function retry(message) {
  if (running) return;
  endEdit();
  const aside = setAside(current.messages.indexOf(message));
  drawAll();
  reply(aside);
}

// --- answers --------------------------------------------------------------------------------------------

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  const aside = setAside(editing ? current.messages.indexOf(editing.message) : current.messages.length, text);
  if (!aside.from) current.title = text.slice(0, 60);
  current.messages.push({ role: "user", content: text });
  if (!aside.messages.length) keep(current);
  compose(editing?.draft ?? "");
  editing = null;
  drawAll();
  reply(aside);
}

const asked = (messages) => messages.map((each) => ({
  role: each.role, content: each.content, ...(each.thoughts ? { reasoning_content: each.thoughts } : {}),
}));

async function reply(aside) {
  const conversation = current, message = { role: "assistant", content: "" }, control = new AbortController();
  const messages = asked(conversation.messages);
  conversation.messages.push(message);
  const view = (running = { message, stop: () => control.abort() }, viewOf(message));
  log.append(view.whole);
  busy(true);
  say("Waiting for the answer …");
  let drawing = 0;
  try {
    for await (const event of answer(picker.value, messages, control.signal)) {
      take(message, event);
      if (aside.messages.length && !isEmpty(message)) { aside.messages = []; keep(conversation); }
      drawing ||= requestAnimationFrame(() => { drawing = 0; follow(() => draw(view)); });
    }
    say("The answer is complete.");
  } catch (error) {
    failed(message, error);
  } finally {
    cancelAnimationFrame(drawing);
    running = null;
    busy(false);
    if (conversation === current) { follow(() => draw(view)); drawContext(); }
    if (conversations.includes(conversation)) finish(conversation, aside); // else it was deleted meanwhile
  }
}

const isEmpty = (message) => !message.content && !message.thoughts;

function finish(conversation, aside) {
  const last = conversation.messages.at(-1);
  if (last?.role === "assistant" && isEmpty(last)) {
    conversation.messages.pop();
    if (aside.messages.length) bringBack(conversation, aside);
    if (conversation === current) drawAll();
  }
  keep(conversation);
}

function take(message, event) {
  const delta = event.choices[0]?.delta ?? {};
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.thoughts = (message.thoughts ?? "") + delta.reasoning_content;
  if (delta.reasoning_content) say("Thinking …");
  else if (delta.content) say("Answering …");
  const progress = event.prompt_progress;
  if (progress && progress.processed < progress.total) {
    say(`Reading ${progress.processed.toLocaleString("en")} of ${progress.total.toLocaleString("en")} tokens …`);
  }
  if (event.usage) message.used = event.usage.total_tokens;
  if (event.timings) message.figures = figures(event.timings);
}

const figures = (timings) => {
  const cached = timings.cache_n ? `, ${timings.cache_n} from cache` : "";
  return `${timings.predicted_per_second.toFixed(1)} tokens/s · ${timings.predicted_n} tokens${cached}`;
};

function failed(message, error) {
  if (error.name === "AbortError") {
    message.figures = "stopped";
    say("Stopped.");
  } else if (error.status === 401) {
    say("This server needs an API key.", true);
    at("ask").showModal();
  } else {
    message.figures = "interrupted";
    say(error instanceof Refused ? error.message : `Cannot reach the server: ${error.message}`, true);
  }
}

// Draws, and stays at the end of the conversation where it was there.
function follow(drawNow) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  drawNow();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  log.setAttribute("aria-busy", String(is));
  if (!is && document.activeElement === document.body) prompt.focus();
}

// --- models, theme, keys ----------------------------------------------------------------------------------

async function loadModels() {
  try {
    const rows = await models();
    known = new Map(rows.map((row) => [row.id, row]));
    picker.replaceChildren(...rows.map((row) => new Option(row.id, row.id)));
    const chosen = localStorage.getItem("kt.model");
    if (known.has(chosen)) picker.value = chosen;
    drawContext();
  } catch (error) {
    failed({}, error);
  }
}

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

function otherTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (isDark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem("kt.theme", next);
  dress(next);
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("stop").addEventListener("click", () => running?.stop());
at("cancel").addEventListener("click", endEdit);
at("fresh").addEventListener("click", () => turnTo(begin()));
at("theme").addEventListener("click", otherTheme);
at("menu").addEventListener("click", () => at("menu").setAttribute("aria-expanded", String(side.classList.toggle("open"))));
at("ask").addEventListener("close", () => { remember(at("key").value); at("key").value = ""; loadModels(); });
picker.addEventListener("change", () => { localStorage.setItem("kt.model", picker.value); drawContext(); });
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) { if (editing) endEdit(); else running?.stop(); }
  if (event.altKey && event.code === "KeyN") { event.preventDefault(); turnTo(begin()); }
});

dress(localStorage.getItem("kt.theme"));
drawAll();
loadModels();
