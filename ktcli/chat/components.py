"""Decides which components a `tokenizer.json` may have, and which of them may run inside this process.

The tokenizers library believes its file: a damaged table aborts the process, a chain of replacements fills the
memory, and a pattern may take for ever. So the file is looked at before the library sees it. What published
tokenizers do not use is refused by name. What they use, with the patterns that they publish, runs in this process;
everything between (a pattern that nobody published, a table of normalizations) runs confined, in a helper process with
limits (`confined`). The names are those of the file format of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.weights.gguf.words import WORDS

MAX_STEPS = 16  # of a normalizer, pre-tokenizer or decoder; published ones have up to 7
MAX_DEPTH = 3  # of sequences in sequences; published ones have 1
MAX_GROWTH = 64  # times that all steps together may make a text longer; published ones stay at 18
MAX_WORD_CHARS = 4096  # of a token; published ones have up to 512
MAX_PATTERN_CHARS = 4096
MAX_CHARSMAP_CHARS = 2 << 20  # of a table of normalizations in base64; the usual one has 316,720

Json = Mapping[str, Any]

_CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
# Patterns of published tokenizers. The others cut words as quickly, but nobody has looked.
KNOWN_PATTERNS = frozenset(
    {pattern for words in WORDS.values() for pattern in words.patterns}
    | {
        " {2,}",
        r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\s+(?!\S)|\s",  # kt-mini
        rf"{_CL100K}|\p{{N}}{{1,3}}|{_REST}",
        rf"{_CL100K}|\p{{N}}|{_REST}",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"[0-9][0-9][0-9]",
        r"[0-9]",
        r"\p{N}",
        r"[\r\n]",
        r"\s+$",
    }
)

# The most that a step can lengthen a text, by its type: characters for each one of before.
_NORMALIZERS: dict[str, int] = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Nmt": 1, "Lowercase": 3, "Strip": 1, "StripAccents": 1,
    "BertNormalizer": 12, "ByteLevel": 4, "Prepend": 1, "Replace": 1, "Precompiled": 18, "Sequence": 1,
}  # fmt: skip
_PRE_TOKENIZERS: dict[str, int] = {
    "ByteLevel": 4, "Split": 1, "Digits": 1, "Punctuation": 1, "Metaspace": 1, "Whitespace": 1, "WhitespaceSplit": 1,
    "BertPreTokenizer": 1, "UnicodeScripts": 1, "CharDelimiterSplit": 1, "Sequence": 1,
}  # fmt: skip
_DECODERS: dict[str, int] = {
    "ByteLevel": 1, "ByteFallback": 1, "Fuse": 1, "Strip": 1, "Replace": 1, "Metaspace": 1, "WordPiece": 2,
    "BPEDecoder": 1, "CTC": 1, "Sequence": 1,
}  # fmt: skip
_POST_PROCESSORS = ("ByteLevel", "TemplateProcessing", "RobertaProcessing", "BertProcessing", "Sequence")  # fmt: skip
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
# Types that cannot run away, whatever their text.
_PLAIN = frozenset(
    "NFC NFD NFKC NFKD Lowercase Strip StripAccents ByteLevel Prepend Replace Split Digits Punctuation Metaspace "
    "Whitespace WhitespaceSplit ByteFallback Fuse Sequence".split()
)
_PARTS = {
    "normalizer": ("normalizers", _NORMALIZERS),
    "pre_tokenizer": ("pretokenizers", _PRE_TOKENIZERS),
    "decoder": ("decoders", _DECODERS),
}


@dataclass(frozen=True, slots=True)
class Examined:
    """The findings about a `tokenizer.json`.

    Attributes:
        known: whether it may run inside this process.
        decoder: the kinds of the decoder's steps, in order; joining tokens is not one of them.
    """

    known: bool
    decoder: tuple[str, ...]


def examine(document: Json, where: str) -> Examined:
    """Looks at a whole `tokenizer.json`.

    Args:
        where: the name of its file, for sentences of errors.
    Raises:
        BadCheckpoint: a component is unknown, or larger than any published one.
    """

    def refuse(what: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{where} {what}", hint="kt reads the components that published tokenizers use"
        )

    plain = _model(document.get("model"), refuse)
    for part, (children, allowed) in _PARTS.items():
        steps = _steps(document.get(part), part, children, refuse)
        _count(steps, part, refuse)
        growth = 1
        for step in steps:
            kind = str(step.get("type"))
            if kind not in allowed:
                raise refuse(f"has the {part} {kind[:40]!r}, which no published tokenizer uses")
            growth *= allowed[kind] * _own_growth(step, refuse)
            if growth > MAX_GROWTH:
                raise refuse(f"has a {part} that makes texts more than {MAX_GROWTH} times longer")
            plain = plain and kind in _PLAIN and _is_known(step)
    _post_processor(document.get("post_processor"), refuse)
    kinds = (str(step.get("type")) for step in steps)  # of the last part: the decoder
    decoder = tuple(kind for kind in kinds if kind not in ("Sequence", "Fuse"))
    return Examined(plain, decoder)


def _model(model: Any, refuse: Callable[[str], BadCheckpoint]) -> bool:
    """Returns whether a model is of a kind that may run inside this process."""
    if not isinstance(model, Mapping):
        return False  # the library has a sentence for that
    # Old files leave the type out; the library then tries all.
    kind = model.get("type", "BPE" if "merges" in model else "WordLevel")
    if kind not in _MODELS:
        raise refuse(f"has a model of the type {str(kind)[:40]!r}")
    vocab = model.get("vocab")
    words: Iterable[Any] = vocab if isinstance(vocab, Mapping) else ()
    if isinstance(vocab, list):  # of [word, score]
        words = [row[0] for row in vocab if isinstance(row, list) and row]
    if any(isinstance(word, str) and len(word) > MAX_WORD_CHARS for word in words):
        raise refuse(f"has a token of more than {MAX_WORD_CHARS:,} characters")
    if model.get("dropout"):
        raise refuse("drops merges at random, which is for training")
    affixes = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    if any(isinstance(affix, str) and len(affix) > MAX_WORD_CHARS for affix in affixes):
        raise refuse(f"has a prefix or suffix of more than {MAX_WORD_CHARS:,} characters")
    return kind == "BPE" and not any(affixes)


def _steps(
    step: Any, part: str, children: str, refuse: Callable[[str], BadCheckpoint], depth: int = 0
) -> list[Json]:
    """A component and all that it holds, as a flat list."""
    if step is None:
        return []
    if not isinstance(step, Mapping):
        raise refuse(f"has a {part} that is no object")
    if depth > MAX_DEPTH:
        raise refuse(f"nests its {part} more than {MAX_DEPTH} deep")
    inner = step.get(children) if step.get("type") == "Sequence" else None
    found = [step]
    for child in inner if isinstance(inner, list) else ():
        found += _steps(child, part, children, refuse, depth + 1)
        _count(found, part, refuse)
    return found


def _count(steps: list[Json], part: str, refuse: Callable[[str], BadCheckpoint]) -> None:
    if len(steps) > MAX_STEPS + 1:
        raise refuse(f"has a {part} of more than {MAX_STEPS} steps")


def _own_growth(step: Json, refuse: Callable[[str], BadCheckpoint]) -> int:
    """The factor by which a step can lengthen a text through what it is told to write."""
    kind = step.get("type")
    if len(str(step.get("precompiled_charsmap", ""))) > MAX_CHARSMAP_CHARS:
        raise refuse("has a table of normalizations larger than any published one")
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend", "")))
    pattern = step.get("pattern")
    if kind not in ("Replace", "Split"):
        return 1
    if not isinstance(pattern, (Mapping, str)):
        raise refuse(f"has a {kind} without a pattern")
    fixed = pattern if isinstance(pattern, str) else pattern.get("String")
    regex = None if isinstance(pattern, str) else pattern.get("Regex")
    said = fixed if isinstance(fixed, str) else regex
    if not isinstance(said, str) or not said or len(said) > MAX_PATTERN_CHARS:
        raise refuse(f"has a {kind} whose pattern is empty or too long")
    if kind == "Split":
        return 1
    content = str(step.get("content", ""))
    if isinstance(fixed, str):
        return max(1, -(-len(content) // len(fixed)))
    # An unknown expression may match the empty text between any two characters.
    return max(1, len(content) + (said not in KNOWN_PATTERNS))


def _is_known(step: Json) -> bool:
    """Returns whether a step's regular expression, if it has one, is that of a published tokenizer."""
    pattern = step.get("pattern")
    return (
        not isinstance(pattern, Mapping)
        or "Regex" not in pattern
        or str(pattern["Regex"]) in KNOWN_PATTERNS
    )


def _post_processor(step: Any, refuse: Callable[[str], BadCheckpoint]) -> None:
    """Examines the post-processor, which is never used, but the library reads it."""
    for each in _steps(step, "post_processor", "processors", refuse):
        if each.get("type") not in _POST_PROCESSORS:
            raise refuse(f"has the post_processor {str(each.get('type'))[:40]!r}")
