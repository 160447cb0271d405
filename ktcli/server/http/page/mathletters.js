// Letters of formulas in their styles: ℝ, 𝓛, 𝐱. Browsers read only one value of MathML's `mathvariant`, and have characters
// of their own for the other styles (Unicode's block of mathematical alphanumeric symbols).

// For each style, where its A, a and 0 are; 0: it has none.
const STYLES = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce],
  italic: [0x1d434, 0x1d44e, 0],
  "bold-italic": [0x1d468, 0x1d482, 0],
  script: [0x1d49c, 0x1d4b6, 0],
  "bold-script": [0x1d4d0, 0x1d4ea, 0],
  fraktur: [0x1d504, 0x1d51e, 0],
  "bold-fraktur": [0x1d56c, 0x1d586, 0],
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  "bold-sans-serif": [0x1d5d4, 0x1d5ee, 0x1d7ec],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
// Those that Unicode had before the block.
const EARLIER = {
  italic: { h: "ℎ" },
  script: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  fraktur: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
  "double-struck": { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
};

function styled(letter, style) {
  const [capital, small, digit] = STYLES[style], code = letter.charCodeAt(0);
  const from = /[A-Z]/.test(letter) ? [capital, 65] : /[a-z]/.test(letter) ? [small, 97] : /[0-9]/.test(letter) ? [digit, 48] : null;
  if (EARLIER[style]?.[letter]) return EARLIER[style][letter];
  return from?.[0] ? String.fromCodePoint(from[0] + code - from[1]) : letter;
}

export function styleLetters(made) {
  for (const node of made.querySelectorAll("[mathvariant]")) {
    const style = node.getAttribute("mathvariant");
    if (!Object.hasOwn(STYLES, style) || node.children.length) continue;
    node.textContent = [...node.textContent].map((letter) => styled(letter, style)).join("");
    node.setAttribute("mathvariant", "normal"); // else a single letter is made italic
  }
}
