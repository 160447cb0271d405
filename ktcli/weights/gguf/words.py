"""Patterns that cut texts into words before their bytes are merged, by the name that GGUF files give them.

The patterns are those of the models' own `tokenizer.json`; they are data that a GGUF file only names. A name
that is not here is refused: another pattern gives other tokens, and nobody would see why a model is worse.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE_DIGIT = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_THREE_DIGITS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_MARKS = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, end: str) -> str:
    """A pattern of words that end where a lower-case letter meets an upper-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}[{upper}]*[{lower}]+{end}|{before}[{upper}]+[{lower}]*{end}"


_O200K = _cased(_UPPER, _LOWER, f"{_SHORT}?") + (
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _cased(_UPPER, _LOWER, "") + (
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_HAN = "&&[^\\p{Han}]"
KIMI = rf"[\p{{Han}}]+|{_cased(_UPPER + _NOT_HAN, _LOWER + _NOT_HAN, _SHORT + '?')}|\p{{N}}{{1,3}}|{_REST}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Letters that have two cases, as the model's authors listed them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)


@dataclass(frozen=True, slots=True)
class Words:
    """The patterns and settings by which texts are cut into words.

    Attributes:
        patterns: regular expressions; each cuts the pieces that the ones before left whole.
        ignore_merges: whether a word that is a token is taken as it is.
        nfc: whether texts are normalised to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False


_LLAMA3, _QWEN = Words((_THREE_DIGITS,), ignore_merges=True), Words((_ONE_DIGIT,), nfc=True)
_GPT4O = Words((_O200K,), ignore_merges=True)
# tokenizer.ggml.pre -> how its texts are cut.
WORDS: dict[str, Words] = {
    "gpt-2": Words((_GPT2,)),
    "smollm": Words((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": Words((_THREE_DIGITS,)),
    "chatglm-bpe": Words((_THREE_DIGITS,)),
    "glm4": _LLAMA3,
    "tekken": Words((_TEKKEN,), ignore_merges=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "qwen35": Words((_MARKS,), nfc=True),
    "deepseek-llm": Words(_DEEPSEEK_LLM),
    "deepseek-v3": Words(_DEEPSEEK_V3),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "minimax-m2": Words((_O200K,)),
    "kimi-k2": Words((KIMI,), ignore_merges=True),
}
