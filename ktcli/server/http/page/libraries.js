// The libraries of others, pinned in libraries.py. Two of them are scripts that say what they have as a global value.

import "./vendor/dompurify-3.5.0.min.js";
import "./vendor/katex-0.19.1.min.js";

export const { DOMPurify, katex } = globalThis;
export { default as highlighter } from "./vendor/highlight-11.12.0.min.js";
export { default as markdownIt } from "./vendor/markdown-it-15.0.3.min.mjs";
