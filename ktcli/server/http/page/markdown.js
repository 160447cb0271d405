// Markdown as markup, made by markdown-it. An answer may be hostile: what the libraries are given is bounded, and text beyond
// the bounds is shown as it was written. Nothing made here reaches the page but through sanitizing.js.

import { highlighter, markdownIt } from "./libraries.js";
import { escaped, mathematics } from "./mathematics.js";

export const TEXT_MOST = 400_000; // characters of a text
const BLOCK_MOST = 50_000; // of a list, a table, a paragraph …
const INLINE_MOST = 20_000; // of a text with marks in it
const CODE_MOST = 20_000; // of code that is coloured
const COLOURED_MOST = 60_000; // in one go
const BLOCKS_MOST = 3000; // of a text: making and laying out elements takes longest
const CACHED_MOST = 200;
const DEEPEST = 24; // lists or quotes in each other, and marks in marks

const cached = new Map(); // coloured code

function coloured(code, language, env) {
  const key = `${language} ${code}`;
  if (cached.has(key)) return cached.get(key);
  env.coloured = (env.coloured ?? 0) + code.length;
  if (!highlighter.getLanguage(language) || code.length > CODE_MOST || env.coloured > COLOURED_MOST) return escaped(code);
  const made = highlighter.highlight(code, { language, ignoreIllegals: true }).value;
  if (cached.size >= CACHED_MOST) cached.clear();
  cached.set(key, made);
  return made;
}

const parser = markdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }); // main.py is no address in Paraguay
parser.linkify.add("//", null); // a comment in a text is not an address
parser.validateLink = (address) => /^(?:https?:|mailto:)/i.test(address);
mathematics(parser);

const { rules } = parser.renderer;
const codeBlock = (code, language, env) =>
  `<pre class="code" title="${escaped(language)}"><code>${coloured(code, language.toLowerCase(), env)}</code></pre>\n`;
rules.fence = (tokens, at, _options, env) => codeBlock(tokens[at].content, tokens[at].info.trim().split(/\s/)[0].slice(0, 40), env);
rules.code_block = (tokens, at, _options, env) => codeBlock(tokens[at].content, "", env);
rules.plain = (tokens, at) => `<div class="plain">${escaped(tokens[at].content)}</div>`;
rules.table_open = () => '<div class="wide"><table>';
rules.table_close = () => "</table></div>";
rules.image = (tokens, at) => { // which is not loaded
  const address = tokens[at].attrGet("src"), words = escaped(tokens[at].content || "image");
  return address ? `<a href="${escaped(address)}">${words}</a>` : words;
};
for (const name of ["th_open", "td_open"]) {
  rules[name] = (tokens, at) => {
    const side = /(left|center|right)/.exec(tokens[at].attrGet("style") ?? "")?.[1];
    return `<${tokens[at].tag}${side ? ` class="${side}"` : ""}>`;
  };
}

// --- bounds ----------------------------------------------------------------------------------------------

// The blocks of the outermost level, each as { from, to }: places in a list of tokens.
function blocksOf(tokens) {
  const found = [];
  let from = 0, depth = 0;
  for (const [at, token] of tokens.entries()) {
    depth += token.nesting;
    if (depth) continue;
    found.push({ from, to: at + 1 });
    from = at + 1;
  }
  return found;
}

function isTooDeep(line) {
  const lead = /^[ \t>*+\-.)\d]*/.exec(line)[0];
  if (lead.length <= 2 * DEEPEST) return false;
  const marks = lead.match(/>|[-*+](?=[ \t])|\d[.)](?=[ \t])/g)?.length ?? 0;
  return marks > DEEPEST || (marks > 0 && lead.search(/[^ \t]/) > 2 * DEEPEST);
}

// Replaces blocks that are too large or too deep by their text.
function bounded(state) {
  const lines = state.src.split("\n"), kept = [];
  for (const { from, to } of blocksOf(state.tokens)) {
    const first = state.tokens[from];
    const source = lines.slice(...(first.map ?? [0, 0]));
    const isCode = first.type === "fence" || first.type === "code_block";
    const length = source.reduce((sum, line) => sum + line.length + 1, 0);
    if (isCode || (length <= BLOCK_MOST && !source.some(isTooDeep))) {
      for (let at = from; at < to; at++) kept.push(state.tokens[at]);
      continue;
    }
    const plain = new state.Token("plain", "div", 0);
    Object.assign(plain, { content: source.join("\n"), map: first.map, block: true });
    kept.push(plain);
  }
  state.tokens = kept;
}

function inline(state) {
  for (const token of state.tokens) {
    if (token.type !== "inline") continue;
    if (token.content.length <= INLINE_MOST) state.md.inline.parse(token.content, state.md, state.env, token.children);
    if (token.content.length > INLINE_MOST || depthOf(token.children) > DEEPEST) {
      const text = new state.Token("text", "", 0);
      text.content = token.content;
      token.children = [text];
    }
  }
}

function depthOf(tokens) {
  let depth = 0, most = 0;
  for (const { nesting } of tokens) most = Math.max(most, (depth += nesting));
  return most;
}

// The page has a heading of the first level already; no level is left out on the way down.
function headings(state) {
  let last = 1;
  for (const token of state.tokens) {
    if (token.type === "heading_open") last = Math.min(last + 1, Number(token.tag[1]) + 1, 6);
    if (token.type.startsWith("heading_")) token.tag = `h${last}`;
  }
}

parser.core.ruler.at("inline", inline);
parser.core.ruler.before("inline", "bounded", bounded);
parser.core.ruler.push("headings", headings);

// --- what the page asks for ------------------------------------------------------------------------------

// The blocks of a text, each as { line, markup }: its first line and what becomes one element.
// env: what the parser remembers from one part of a text to the next; `isOpen` while the text is being written.
// before: how many blocks there are before this part.
export function blocks(text, env, before = 0) {
  const tokens = parser.parse(text, env), found = blocksOf(tokens), most = Math.max(0, BLOCKS_MOST - before);
  env.formulas = env.coloured = 0;
  const made = found.slice(0, most).map(({ from, to }) => ({
    line: tokens[from].map?.[0] ?? 0,
    markup: parser.renderer.render(tokens.slice(from, to), parser.options, env),
  }));
  if (found.length > most) made.push(rest(text, tokens[found[most].from].map?.[0] ?? 0));
  return made;
}

const rest = (text, line) => ({ line, markup: `<div class="plain">${escaped(text.split("\n").slice(line).join("\n"))}</div>` });
