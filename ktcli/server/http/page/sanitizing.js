// The only way from markup to elements: DOMPurify, with a list of what answers may consist of. There are no styles, no
// images, no frames, no forms and no scripts in it, and links lead to http, https and mailto only.

import { DOMPurify } from "./libraries.js";

const TAGS = `a blockquote br code del div em h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul
  annotation math menclose merror mfenced mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms
  mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover semantics`.split(/\s+/);
const ATTRIBUTES = `class href start title
  accent accentunder columnalign columnlines columnspacing columnspan depth display displaystyle encoding fence frame height
  largeop linethickness lspace mathbackground mathcolor mathsize mathvariant maxsize minsize movablelimits notation
  rowlines rowspacing rspace scriptlevel separator stretchy symmetric voffset width xmlns`.split(/\s+/);

const LINK = /^(?:https?:|mailto:)/i;
// DOMPurify holds each value against this, not addresses alone: what has a scheme has one of these.
const VALUE = /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$))/i;

const purifier = DOMPurify(window);
purifier.setConfig({
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ATTRIBUTES,
  ALLOWED_URI_REGEXP: VALUE,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
});
purifier.addHook("afterSanitizeAttributes", (node) => {
  if (!node.hasAttribute("href")) return;
  if (node.nodeName !== "A" || !LINK.test(node.getAttribute("href"))) return node.removeAttribute("href");
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
  node.setAttribute("title", node.href);
});

// The elements of a markup.
export const sanitized = (markup) => purifier.sanitize(markup);
