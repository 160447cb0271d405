// Mathematics in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] in lines of their own. KaTeX makes MathML of it, which
// needs neither styles nor fonts. What it is given is bounded, since an answer may be hostile; the rest is shown as it is.

import { katex } from "./libraries.js";

const INLINE_MOST = 1000; // characters
const BLOCK_MOST = 6000;
const LINES_MOST = 120; // between the marks of a block
const FORMULAS_MOST = 500; // new ones in one go
const MARKUP_MOST = 200_000; // characters that a formula may become
const CACHED_MOST = 1000;
const DEFINES = /\\(?:[gex]?def|let|futurelet|(?:re)?newcommand|providecommand)(?![a-zA-Z])/; // macros could grow without end

const cached = new Map(); // markup by the mode and the formula: an answer is drawn again and again while it is written

export const escaped = (text) => text.replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);

function markup(formula, isBlock, env) {
  const key = `${isBlock} ${formula}`, known = cached.get(key);
  if (known) return known;
  env.formulas = (env.formulas ?? 0) + 1;
  const made = env.formulas > FORMULAS_MOST || DEFINES.test(formula) ? null : rendered(formula, isBlock);
  const found = made && made.length <= MARKUP_MOST ? made : `<code>${escaped(formula)}</code>`;
  if (cached.size >= CACHED_MOST) cached.clear();
  cached.set(key, found);
  return found;
}

const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxExpand: 300, maxSize: 50 };

function rendered(formula, displayMode) {
  try {
    return katex.renderToString(formula, { ...OPTIONS, displayMode });
  } catch {
    return null; // it is not a formula that KaTeX knows
  }
}

const isOdd = (text, at) => { // whether a sign is escaped by the backslashes before it
  let slashes = 0;
  while (text[at - 1 - slashes] === "\\") slashes++;
  return slashes % 2 === 1;
};

// Where the mark that closes a formula in a line begins, or -1.
function closing(text, from, mark) {
  const near = text.slice(from, from + INLINE_MOST + mark.length);
  for (let at = near.indexOf(mark); at >= 0; at = near.indexOf(mark, at + 1)) {
    if (isOdd(near, at)) continue;
    if (mark === "$" && (/\s/.test(near[at - 1] ?? " ") || /[\d$]/.test(near[at + 1] ?? ""))) continue; // prices: $5 and $6
    return at ? from + at : -1;
  }
  return -1;
}

const INLINE = [["$$", "$$", true], ["$", "$", false], ["\\(", "\\)", false], ["\\[", "\\]", true]];

function inlineRule(state, silent) {
  const { src, pos } = state;
  const row = (src[pos] === "$" || src[pos] === "\\") && INLINE.find(([opens]) => src.startsWith(opens, pos));
  if (!row) return false;
  const [opens, closes, isBlock] = row, from = pos + opens.length;
  if (opens === "$" && (/\s/.test(src[from] ?? " ") || /[\w$]/.test(src[pos - 1] ?? ""))) return false;
  const end = closing(src, from, closes);
  if (end < 0) return false;
  if (!silent) {
    const token = state.push("formula", "math", 0);
    token.content = src.slice(from, end).trim();
    token.meta = { isBlock };
  }
  state.pos = end + closes.length;
  return true;
}

const BLOCK = [["$$", "$$"], ["\\[", "\\]"]];

// A formula in lines of its own. One that is not closed yet stays as it is while the answer is being written.
function blockRule(state, startLine, endLine, silent) {
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trimEnd();
  const first = lineAt(startLine), row = BLOCK.find(([opens]) => first.startsWith(opens));
  if (!row || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const [opens, closes] = row;
  let line = startLine, length = 0, isClosed = first.length > opens.length + closes.length - 1 && first.endsWith(closes);
  if (!isClosed && first.indexOf(closes, opens.length) >= 0) return false; // text follows: it is a formula in a line
  while (!isClosed && line + 1 < endLine && line - startLine < LINES_MOST && length < BLOCK_MOST) {
    line++;
    if (state.sCount[line] < state.blkIndent && lineAt(line)) return false;
    length += state.eMarks[line] - state.bMarks[line] + 1;
    isClosed = lineAt(line).endsWith(closes);
  }
  const isPending = !isClosed && state.env.isOpen && line + 1 >= endLine && length < BLOCK_MOST;
  if (!isClosed && !isPending) return false;
  const text = state.getLines(startLine, line + 1, state.sCount[startLine], false).trim();
  const content = text.slice(opens.length, isClosed ? -closes.length : undefined).trim();
  if (!content && isClosed) return false;
  if (silent) return true;
  const token = state.push("formula_block", "math", 0);
  Object.assign(token, { content, meta: { isPending }, map: [startLine, line + 1] });
  state.line = line + 1;
  return true;
}

// Adds the two rules to a parser.
export function mathematics(parser) {
  parser.inline.ruler.before("escape", "formula", inlineRule);
  parser.block.ruler.after("blockquote", "formula_block", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.renderer.rules.formula = (tokens, at, _options, env) =>
    `<span class="${tokens[at].meta.isBlock ? "formula" : "math"}">${markup(tokens[at].content, tokens[at].meta.isBlock, env)}</span>`;
  parser.renderer.rules.formula_block = (tokens, at, _options, env) => {
    const { content, meta } = tokens[at];
    return `<div class="formula">${meta.isPending ? `<code>${escaped(content)}</code>` : markup(content, true, env)}</div>`;
  };
}
