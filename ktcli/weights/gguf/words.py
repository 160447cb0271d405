"""How texts are cut into words before their bytes are merged, by the name that GGUF files give it.

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
    """Words that end where a lower-case letter meets an upper-case one."""
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
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)


@dataclass(frozen=True, slots=True)
class Words:
    """One way to cut.

    Attributes:
        patterns: each cuts what the ones before left whole.
        ignore_merges: a word that is a token is taken as it is.
        nfc: texts are composed first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False


_LLAMA3, _QWEN = Words((_THREE_DIGITS,), ignore_merges=True), Words((_ONE_DIGIT,), nfc=True)
_GPT4O = Words((_O200K,), ignore_merges=True)
# tokenizer.ggml.pre -> how its texts are cut.
WORDS: dict[str, Words] = {
    "gpt-2": Words((_GPT2,)),
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
