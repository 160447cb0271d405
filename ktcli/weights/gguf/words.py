"""Patterns that split texts into words before their bytes are merged, by the names that GGUF files give them.

The patterns are those of the models' own `tokenizer.json` where llama.cpp's list of names (build 11549) says them
or they are known, else those by which llama.cpp cuts; they are data that a GGUF file only names. A name that is not
here is refused: another pattern gives other tokens, and nobody would see why a model is worse. So is "default", which
llama.cpp's converter gave to tokenizers that it did not know, and the ways of vocabularies that are not of bytes.
"""

from __future__ import annotations

from ktcli.records import dataclass

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ONE_DIGIT = rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}"
_THREE_DIGITS = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_ALL_DIGITS = rf"{_SHORT}|{_LETTERS}|\p{{N}}+|{_REST}"
_NO_SHORT = rf"{_LETTERS}|\p{{N}}|{_REST}"
_SEED = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_PHRASES = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Runs of blanks are cut into powers of two.
_POWERS = "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1))
_JAIS = (
    rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    rf"{_POWERS}\s{{1,2}}(?!\S)|\s{{1}}"
)
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+"
CL100K_REST = r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BAILING = rf"{CL100K}|\p{{N}}|{CL100K_REST}"
_MARKS = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, end: str) -> str:
    """A pattern of words that end where a lower-case letter meets an upper-case one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}[{upper}]*[{lower}]+{end}|{before}[{upper}]+[{lower}]*{end}"


_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_SHORT = _cased(_UPPER, _LOWER, f"{_SHORT}?")
_O200K = rf"{_CASED_SHORT}|\p{{N}}{{1,3}}|{_SLASHES}"
_TEKKEN = rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}|{_SLASHES}"
_NOT_HAN = "&&[^\\p{Han}]"
KIMI = rf"[\p{{Han}}]+|{_cased(_UPPER + _NOT_HAN, _LOWER + _NOT_HAN, _SHORT + '?')}|\p{{N}}{{1,3}}|{_REST}"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_SIGNED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK_V3 = (r"\p{N}{1,3}", _CJK, rf"{_SIGNED}[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_SPARK = (r"\p{N}{1,3}", _CJK, rf"{_SIGNED}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
_YOUTU = (
    rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}",
    rf"{_CASED_SHORT}|\p{{N}}|{_SLASHES}",
)
# Threes of digits from the right.
DIGITS_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"
DIGIT_RUNS_FROM_RIGHT = r"\d{1,3}(?=(?:\d{3})*(?!\d))"
THREES_FROM_RIGHT = r"(?=(\d{3})+(?!\d))"
_AFMOE = (
    DIGIT_RUNS_FROM_RIGHT,
    "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK_V3[2],
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
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True, slots=True)
class Words:
    """The patterns and settings by which texts are split into words.

    Attributes:
        patterns: regular expressions; each cuts the pieces that the ones before left whole.
        ignore_merges: whether a word that is a token is taken as it is.
        nfc: whether texts are normalised to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False


# How texts are cut, and the values of tokenizer.ggml.pre that mean it.
_ROWS: tuple[tuple[Words, str], ...] = (
    (
        Words((_GPT2,)),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion granite-docling jina-es jina-de "
        "jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
    ),
    (Words((_GPT2,), nfc=True), "olmo mpt"),
    (
        Words((r"\p{N}", _GPT2)),
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
    ),
    (Words((r"\p{N}", _GPT2), nfc=True), "command-r"),
    (
        Words((_THREE_DIGITS,), ignore_merges=True),
        "llama-bpe llama-v3 llama3 glm4 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (Words((_THREE_DIGITS,)), "smaug-bpe chatglm-bpe dbrx"),
    (Words((r"\p{N}{1,3}", _ALL_DIGITS), ignore_merges=True), "minicpm5"),
    (Words((_JAIS,)), "jais-2"),
    (Words((_TEKKEN,), ignore_merges=True), "tekken"),
    (Words((_ONE_DIGIT,), nfc=True), "qwen2 deepseek-r1-qwen megrez"),
    (Words((_ONE_DIGIT,)), "stablelm2 hunyuan solar-open grok-2 kormo f2llmv2"),
    (Words((_NO_SHORT,)), "ufakzeka"),
    (Words((_LINES, _ONE_DIGIT)), "laguna"),
    (Words((_SEED,)), "seed-coder"),
    (Words((_PHRASES,)), "exaone-moe"),
    (Words((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (Words((_MARKS,), nfc=True), "qwen35"),
    (Words(_DEEPSEEK_LLM), "deepseek-llm"),
    (Words(_DEEPSEEK_CODER), "deepseek-coder"),
    (Words(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (Words(_SPARK), "spark2_5"),
    (Words(_YOUTU, ignore_merges=True), "youtu"),
    (Words(_AFMOE), "afmoe"),
    (Words((_O200K,), ignore_merges=True), "gpt-4o llama4 granite-embed-multi-97m"),
    (Words((_O200K,)), "minimax-m2 kanana2 talkie"),
    (Words((DIGITS_FROM_RIGHT, _O200K)), "tiny_aya cohere2moe"),
    (Words((r"\p{N}+", THREES_FROM_RIGHT)), "superbpe"),
    (Words((KIMI,), ignore_merges=True), "kimi-k2"),
    (Words(_FALCON), "falcon"),
    (Words(_CHAMELEON), "chameleon"),
    (Words((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (Words((_BLOOM, r"\p{N}")), "viking"),
)
# tokenizer.ggml.pre -> how its texts are cut.
WORDS: dict[str, Words] = {name: words for words, names in _ROWS for name in names.split()}
