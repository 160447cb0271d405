// Markdown as elements of the page. What a model says may be hostile: text becomes text nodes only, links lead to
// http and https only, nothing is loaded, and every expression looks ahead a bounded way.

const DEEPEST = 8;

// Brings `container` to show `text`; blocks that did not change stay as they are.
export function show(container, text) {
  let there = container.firstElementChild; // one after the other: a place in a list of elements is counted anew after each change
  for (const block of split(text)) {
    const next = there?.nextElementSibling ?? null;
    if (there?.markdown !== block) {
      const made = build(block, 0);
      made.markdown = block;
      if (there) there.replaceWith(made); else container.append(made);
    }
    there = next;
  }
  while (there) {
    const next = there.nextElementSibling;
    there.remove();
    there = next;
  }
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]{0,40})/;
const ITEM = /^(\s{0,20})([-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^ {0,3}> ?/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:-\s*-\s*-[-\s]*|\*\s*\*\s*\*[*\s]*|_\s*_\s*_[_\s]*)$/;
const TABLE_RULE = /^[\s|:-]+$/;

// The sources of the blocks of a text.
function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at++; continue; }
    const end = endOf(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

// The line behind the block that begins at a line.
function endOf(lines, at) {
  const fence = FENCE.exec(lines[at]);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end++;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return end;
  const item = ITEM.exec(lines[at]), isQuote = QUOTE.test(lines[at]);
  while (end < lines.length) {
    const line = lines[end];
    if (item) {
      const next = ITEM.exec(line);
      if (next && next[1].length <= item[1].length && isNumber(next[2]) !== isNumber(item[2])) return end; // another list
      if (!line.trim()) { // a list goes on behind an empty line with an item or an indented one
        if (end + 1 < lines.length && (ITEM.test(lines[end + 1]) || /^\s{2}/.test(lines[end + 1]))) { end++; continue; }
        return end;
      }
      if (!/^\s/.test(line) && (FENCE.test(line) || HEADING.test(line) || QUOTE.test(line))) return end;
    } else {
      if (!line.trim() || FENCE.test(line) || HEADING.test(line)) return end;
      if (isQuote !== QUOTE.test(line) || (ITEM.test(line) && !isQuote)) return end;
    }
    end++;
  }
  return end;
}

const isNumber = (mark) => /^\d/.test(mark);

const closes = (line, mark) => line.trim().startsWith(mark) && !line.trim().slice(mark.length).replaceAll(mark[0], "");

// The element of a block.
function build(block, depth) {
  const lines = block.split("\n"), first = lines[0];
  const fence = FENCE.exec(first), heading = HEADING.exec(first);
  if (fence) return code(lines, fence);
  if (heading) return inline(element(`h${Math.min(6, heading[1].length + 1)}`), heading[2].replace(/\s#+\s*$/, ""), 0);
  if (RULE.test(first) && lines.length === 1) return element("hr");
  if (depth < DEEPEST) {
    if (QUOTE.test(first)) return nested(element("blockquote"), lines.map((line) => line.replace(QUOTE, "")), depth);
    if (ITEM.test(first)) return list(lines, depth);
  }
  if (lines.length > 1 && first.includes("|") && lines[1].includes("-") && TABLE_RULE.test(lines[1])) return table(lines);
  return inline(element("p"), block, 0);
}

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

function nested(into, lines, depth) {
  for (const block of split(lines.join("\n"))) into.append(build(block, depth + 1));
  return into;
}

function code(lines, fence) {
  const closed = lines.length > 1 && closes(lines.at(-1), fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const pre = element("pre");
  pre.tabIndex = 0; // what scrolls can be reached with the keyboard
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", fence[2] ? `Code in ${fence[2]}` : "Code");
  if (navigator.clipboard) pre.append(copier(text)); // browsers have none for pages of other machines without TLS
  pre.append(element("code", text));
  return pre;
}

function copier(text) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  return copy;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]), ordered = isNumber(first[2]);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(first[2], 10);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.slice(Math.min(first[0].length, line.length - line.trimStart().length)));
  }
  for (const item of items) {
    const entry = nested(element("li"), item, depth);
    const only = entry.children.length && entry.firstElementChild.tagName === "P" ? entry.firstElementChild : null;
    if (only) only.replaceWith(...only.childNodes);
    made.append(entry);
  }
  return made;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");

function table(lines) {
  const around = element("div"), made = element("table"), head = element("thead"), body = element("tbody");
  around.className = "wide";
  head.append(rowOf(lines[0], "th"));
  for (const line of lines.slice(2)) body.append(rowOf(line, "td"));
  made.append(head, body);
  around.append(made);
  return around;
}

function rowOf(line, name) {
  const row = element("tr");
  for (const cell of cells(line)) row.append(inline(element(name), cell.trim(), 0));
  return row;
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const LONGEST = 4000; // characters between two marks
const LINK = /^!?\[([^\]\n]{0,500})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s+"[^"\n]{0,300}")?\s*\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]{1,2000}/;

// Appends a text with its marks to an element.
function inline(into, text, depth) {
  let plain = "", at = 0;
  const flush = () => { if (plain) into.append(plain); plain = ""; };
  while (at < text.length) {
    const found = depth < DEEPEST ? special(text, at, depth) : null;
    if (found) {
      flush();
      into.append(found.node);
      at = found.end;
    } else plain += text[at++];
  }
  flush();
  return into;
}

// What is no plain text at a place: its node, and where it ends.
function special(text, at, depth) {
  const letter = text[at];
  if (letter === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return { node: document.createTextNode(text[at + 1]), end: at + 2 };
  if (letter === "\n") {
    return { node: /(?: {2}|\\)$/.test(text.slice(Math.max(0, at - 2), at)) ? element("br") : document.createTextNode("\n"), end: at + 1 };
  }
  if (letter === "`") return verbatim(text, at);
  if (letter === "[" || (letter === "!" && text[at + 1] === "[")) return linked(text, at, depth);
  if (letter === "h" && !/\w/.test(text[at - 1] ?? "")) return address(text, at);
  if ("*_~".includes(letter)) return marked(text, at, depth);
  return null;
}

function verbatim(text, at) {
  let mark = 1;
  while (text[at + mark] === "`" && mark < 9) mark++;
  const end = text.slice(at + mark, at + mark + LONGEST).indexOf("`".repeat(mark));
  return end < 1 ? null : { node: element("code", text.slice(at + mark, at + mark + end)), end: at + 2 * mark + end };
}

function linked(text, at, depth) {
  const near = text.slice(at, at + LONGEST);
  const found = near[near.indexOf("]") + 1] === "(" ? LINK.exec(near) : null;
  return found && { node: link(found[2], found[1] || found[2]), end: at + found[0].length };
}

function address(text, at) {
  const found = ADDRESS.exec(text.slice(at, at + LONGEST));
  if (!found) return null;
  const said = found[0].replace(/[.,;:!?)\]*_]+$/, "");
  return { node: link(said, said), end: at + said.length };
}

function link(to, text) {
  let url = null;
  try { url = new URL(to); } catch { /* it leads nowhere */ }
  if (!url || !["http:", "https:"].includes(url.protocol)) return document.createTextNode(text);
  const made = element("a", text);
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  made.title = url.href;
  return made;
}

function marked(text, at, depth) {
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length, inside = /\w/.test(text[at - 1] ?? "") && mark[0] === "_";
    if (inside || /\s/.test(text[from] ?? " ")) continue;
    const end = text.slice(from, from + LONGEST).indexOf(mark, 1);
    if (end < 1 || /\s/.test(text[from + end - 1])) continue;
    if (mark[0] === "_" && /\w/.test(text[from + end + mark.length] ?? "")) continue;
    return { node: inline(element(name), text.slice(from, from + end), depth + 1), end: from + end + mark.length };
  }
  return null;
}
