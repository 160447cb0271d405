"""Decides which components a `tokenizer.json` may have, and which of them may run inside this process.

The tokenizers library believes its file: a damaged table aborts the process, a chain of replacements fills the
memory, and a pattern may take for ever. So the file is looked at before the library sees it. What published
tokenizers do not use is refused by name. What they use, with the patterns that they publish, runs in this process;
everything between (a pattern that nobody published, a table of normalizations) runs confined, in a helper process with
limits (`confined`). The names are those of the file format of the library.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_VOCAB
from ktcli.records import dataclass
from ktcli.weights.gguf.words import (
    CL100K,
    CL100K_REST,
    DIGIT_RUNS_FROM_RIGHT,
    DIGITS_FROM_RIGHT,
    THREES_FROM_RIGHT,
    WORDS,
)
from ktcli.weights.vocabulary import MAX_MERGES

MAX_STEPS = 16  # of a normalizer, pre-tokenizer or decoder; published ones have up to 7
MAX_DEPTH = 3  # of sequences in sequences; published ones have 1
MAX_GROWTH = 64  # times that all steps together may make a text longer; published ones stay at 18
MAX_GROWTH_HERE = 4  # times longer that the steps of a tokenizer in this process may make a text
MAX_WORD_CHARS = 4096  # of a token; published ones have up to 1,024
MAX_ADDED = 50_000  # added tokens; published ones have up to 6,500
MAX_ADDED_WORD_CHARS = 512  # of an added token; published ones have up to 60
MAX_ADDED_CHARS = 4 << 20  # of all of them after normalization; published ones have up to 260,000
MAX_PATTERN_CHARS = 4096
MAX_CHARSMAP_CHARS = 2 << 20  # of a table of normalizations in base64; the usual one has 316,720
MAX_CHARSMAP_TEXT = 256  # bytes that a character may become by such a table; the usual one has 33

Json = Mapping[str, Any]


def _spelling(pattern: str) -> str:
    """One spelling of a pattern that publishers spell in several ways."""
    for said, plain in (("\r", r"\r"), ("\n", r"\n"), ("\t", r"\t"), (r"\"", '"'), (r"\/", "/")):
        pattern = pattern.replace(said, plain)
    return pattern


# Patterns of published tokenizers. The others cut words as quickly, but nobody has looked.
_PATTERNS = {pattern for words in WORDS.values() for pattern in words.patterns} | {
    " {2,}",
    r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\s+(?!\S)|\s",  # kt-mini
    rf"{CL100K}|\p{{N}}{{1,3}}|{CL100K_REST}",
    r"[0-9]",
}
KNOWN_PATTERNS = frozenset(map(_spelling, _PATTERNS))
# Patterns of published tokenizers that take quadratic time for runs of some characters, and runs that are too long.
_SLOW_RUNS = {
    DIGITS_FROM_RIGHT: r"\d{128}",
    DIGIT_RUNS_FROM_RIGHT: r"\d{128}",
    THREES_FROM_RIGHT: r"\d{128}",
    r"\s+$": r"\s{256}",
}

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
        slow_runs: a regular expression of what a text must not hold that is read inside this process; empty: nothing.
        rewrites: whether the normalizer may make words of the vocabulary from other letters.
    """

    known: bool
    decoder: tuple[str, ...]
    slow_runs: str = ""
    rewrites: bool = False


def examine(document: Json, where: str) -> Examined:
    """Returns the findings about a decoded `tokenizer.json`: whether it may run inside this process, its decoder's
    steps, and what its normalizer and patterns may do to texts.

    Args:
        where: the name of its file, for sentences of errors.
    Raises:
        BadCheckpoint: a component is unknown, or larger than any published one.
    """
    try:
        return _examined(document)
    except _Unusual as error:
        hint = "kt supports the components that published tokenizers use"
        raise BadCheckpoint(f"{where} {error}", hint=hint) from None


class _Unusual(Exception):
    """A component that no published tokenizer has; the message completes a sentence about the file."""


def _examined(document: Json) -> Examined:
    known = _model(document.get("model"))
    parts = {part: _part(document.get(part), part) for part in _PARTS}
    known = known and all(_is_plain(step) for found in parts.values() for step in found.steps)
    known = known and all(found.growth <= MAX_GROWTH_HERE for found in parts.values())
    _added(document.get("added_tokens"), parts["normalizer"].growth)
    _post_processor(document.get("post_processor"))
    patterns = {_regex(step) for found in parts.values() for step in found.steps}
    runs = "|".join(sorted(run for each, run in _SLOW_RUNS.items() if each in patterns))
    kinds = (str(step.get("type")) for step in parts["decoder"].steps)
    decoder = tuple(kind for kind in kinds if kind not in ("Sequence", "Fuse"))
    rewrites = any(_rewrites(step) for step in parts["normalizer"].steps)
    return Examined(known, decoder, runs, rewrites)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a normalizer, pre-tokenizer or decoder, and how many times longer they make a text at most."""

    steps: list[Json]
    growth: int


def _part(found: Any, part: str) -> _Steps:
    children, allowed = _PARTS[part]
    steps = _steps(found, part, children)
    _count(steps, part)
    growth = 1
    for step in steps:
        kind = str(step.get("type"))
        if kind not in allowed:
            raise _Unusual(f"has the {part} {kind[:40]!r}, which kt does not support")
        growth *= allowed[kind] * _own_growth(step)
        if growth > MAX_GROWTH:
            raise _Unusual(f"has a {part} that makes text more than {MAX_GROWTH} times longer")
    return _Steps(steps, growth)


def is_text(letters: str) -> bool:
    """Returns whether a string has no lone surrogate, which JSON can hold and the library cannot."""
    return letters.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in letters)


def _added(rows: Any, growth: int) -> None:
    """Examines the added tokens: the library makes one automaton of all of their letters."""
    if not isinstance(rows, list):
        return  # the library has a sentence for that
    if len(rows) > MAX_ADDED:
        raise _Unusual(f"adds {len(rows):,} tokens, more than {MAX_ADDED:,}")
    chars = 0
    for row in rows:
        content = row.get("content") if isinstance(row, Mapping) else None
        size = len(content) if isinstance(content, str) else 0
        if size > MAX_ADDED_WORD_CHARS:
            raise _Unusual(f"adds a token of more than {MAX_ADDED_WORD_CHARS} characters")
        if isinstance(content, str) and not is_text(content):
            raise _Unusual(f"adds the token {content!r}, which is not Unicode text")
        chars += size * (1 if row.get("normalized") is False else growth) if size else 0
    if chars > MAX_ADDED_CHARS:
        raise _Unusual(
            f"adds tokens of {chars:,} characters together, more than {MAX_ADDED_CHARS:,}"
        )


def _model(model: Any) -> bool:
    """Returns whether a model is of a kind that may run inside this process."""
    if not isinstance(model, Mapping):
        return False  # the library has a sentence for that
    # Old files leave the type out; the library then tries all.
    kind = model.get("type", "BPE" if "merges" in model else "WordLevel")
    if kind not in _MODELS:
        raise _Unusual(f"has a model of the type {str(kind)[:40]!r}")
    vocab = model.get("vocab")
    words: Iterable[Any] = vocab if isinstance(vocab, Mapping) else ()
    if isinstance(vocab, list):  # of [word, score]
        words = [row[0] for row in vocab if isinstance(row, list) and row]
    if any(isinstance(word, str) and len(word) > MAX_WORD_CHARS for word in words):
        raise _Unusual(f"has a token of more than {MAX_WORD_CHARS:,} characters")
    merges = model.get("merges")
    for rows, most, what in ((vocab, MAX_VOCAB, "tokens"), (merges, MAX_MERGES, "merges")):
        if isinstance(rows, (Mapping, list)) and len(rows) > most:
            raise _Unusual(f"has {len(rows):,} {what}, more than {most:,}")
    if model.get("dropout"):
        raise _Unusual("drops merges at random, which is for training")
    affixes = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    if any(isinstance(affix, str) and len(affix) > MAX_WORD_CHARS for affix in affixes):
        raise _Unusual(f"has a prefix or suffix of more than {MAX_WORD_CHARS:,} characters")
    return kind == "BPE" and not any(affixes)


def _steps(step: Any, part: str, children: str, depth: int = 0) -> list[Json]:
    """Returns a component and all that it holds, as a flat list."""
    if step is None:
        return []
    if not isinstance(step, Mapping):
        raise _Unusual(f"has a {part} that is not an object")
    if depth > MAX_DEPTH:
        raise _Unusual(f"nests its {part} more than {MAX_DEPTH} deep")
    inner = step.get(children) if step.get("type") == "Sequence" else None
    found = [step]
    for child in inner if isinstance(inner, list) else ():
        found += _steps(child, part, children, depth + 1)
        _count(found, part)
    return found


def _count(steps: list[Json], part: str) -> None:
    if len(steps) > MAX_STEPS + 1:
        raise _Unusual(f"has a {part} of more than {MAX_STEPS} steps")


def _own_growth(step: Json) -> int:
    """Returns the factor by which a step can lengthen a text through what it is told to write."""
    kind = step.get("type")
    if kind == "Precompiled":
        _charsmap(step.get("precompiled_charsmap"))
        return 1
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend", "")))
    pattern = step.get("pattern")
    if kind not in ("Replace", "Split"):
        return 1
    if not isinstance(pattern, (Mapping, str)):
        raise _Unusual(f"has a {kind} without a pattern")
    fixed = pattern if isinstance(pattern, str) else pattern.get("String")
    regex = None if isinstance(pattern, str) else pattern.get("Regex")
    said = fixed if isinstance(fixed, str) else regex
    if not isinstance(said, str) or not said or len(said) > MAX_PATTERN_CHARS:
        raise _Unusual(f"has a {kind} whose pattern is empty or too long")
    if kind == "Split":
        return 1
    content = str(step.get("content", ""))
    if isinstance(fixed, str):
        return max(1, -(-len(content) // len(fixed)))
    # An unknown expression may match the empty text between any two characters.
    return max(1, len(content) + (_spelling(said) not in KNOWN_PATTERNS))


def _charsmap(table: Any) -> None:
    """Examines a table of normalizations: the size of a trie, the trie in words of 32 bits, texts that end with a
    zero. Source: sentencepiece's normalizer.cc."""
    if not isinstance(table, str) or len(table) > MAX_CHARSMAP_CHARS:
        raise _Unusual("has a normalization table that is missing or larger than any published one")
    try:
        data = base64.b64decode(table, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :]
    if len(data) < 8 or not 0 < size <= len(data) - 4 or size % 4 or not texts.endswith(b"\0"):
        raise _Unusual("has a damaged normalization table: its sizes do not match its parts")
    if max(map(len, texts.split(b"\0"))) > MAX_CHARSMAP_TEXT:
        raise _Unusual(
            f"has a table of normalizations with a text of more than {MAX_CHARSMAP_TEXT} bytes"
        )


def _regex(step: Json) -> str:
    """Returns a step's regular expression; empty if it has none."""
    pattern = step.get("pattern")
    return str(pattern["Regex"]) if isinstance(pattern, Mapping) and "Regex" in pattern else ""


def _is_plain(step: Json) -> bool:
    """Returns whether a step cannot run away: its kind does not, and its pattern is that of a published tokenizer."""
    regex = _regex(step)
    return step.get("type") in _PLAIN and (not regex or _spelling(regex) in KNOWN_PATTERNS)


def _rewrites(step: Json) -> bool:
    """Returns whether a step of the normalizer may write letters that were not in the text, but spaces."""
    if step.get("type") == "Replace":
        return step.get("pattern") != {"String": " "} and not str(step.get("content", "")).isspace()
    return step.get("type") not in ("Sequence", "NFC", "Strip", "Prepend")


def _post_processor(step: Any) -> None:
    """Examines the post-processor, which is never used, but the library reads it."""
    for each in _steps(step, "post_processor", "processors"):
        if each.get("type") not in _POST_PROCESSORS:
            raise _Unusual(f"has the post_processor {str(each.get('type'))[:40]!r}")
