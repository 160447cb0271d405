"""Text files made to harm: tokenizers that abort, grow or never end, as a stranger's repository could have them.

Each is a function from an honest `tokenizer.json` to a hostile one. What must happen with each is in its name's row of
`REFUSED`, `CONFINED` or `HARMLESS`: refused by name before the library sees it; read in the helper process, and ended
there; or of no consequence.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

from ktcli.text.components import MAX_ADDED
from ktcli.weights.vocabulary import MAX_MERGES

Document = dict[str, Any]
ORDINARY = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def with_parts(**parts: Any) -> Callable[[Document], Document]:
    """An honest file with some parts of it replaced."""
    return lambda document: copy.deepcopy({**document, **parts})


def replace(content: str, **pattern: str) -> Document:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, *steps: Document) -> Document:
    return {"type": "Sequence", kind: list(steps)}


def charsmap(data: bytes) -> Document:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def split(regex: str) -> Document:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return sequence("pretokenizers", cut, {**ORDINARY, "use_regex": False})


def nested(depth: int) -> Document:
    step: Document = {"type": "NFC"}
    for _ in range(depth):
        step = sequence("normalizers", step)
    return step


def known_table(trie: bytes, texts: bytes) -> Document:
    """A table of normalizations whose sizes are right, whatever is in it."""
    return charsmap(len(trie).to_bytes(4, "little") + trie + texts)


def in_model(**parts: Any) -> Callable[[Document], Document]:
    """An honest file with some parts of its model replaced."""
    return lambda document: with_parts(model={**document["model"], **parts})(document)


def adding(*contents: str, **flags: Any) -> Callable[[Document], Document]:
    """An honest file with more added tokens."""
    default = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }

    def change(document: Document) -> Document:
        made = copy.deepcopy(document)
        first = len(made["model"]["vocab"]) + len(made["added_tokens"])
        rows = [
            {"id": first + at, "content": text, **default, **flags}
            for at, text in enumerate(contents)
        ]
        made["added_tokens"] += rows
        return made

    return change


def both(*changes: Callable[[Document], Document]) -> Callable[[Document], Document]:
    def change(document: Document) -> Document:
        for each in changes:
            document = each(document)
        return document

    return change


def _long_word(document: Document) -> Document:
    return in_model(vocab={**document["model"]["vocab"], "l" * 1_000_000: 999})(document)


def _pieces(model: str, **more: Any) -> Callable[[Document], Document]:
    """A vocabulary of Unigram or WordPiece with pieces of every length."""
    words = ["<unk>", *("a" * size for size in range(1, 4000))]
    vocab = (
        [[word, -1.0] for word in words]
        if model == "Unigram"
        else {w: i for i, w in enumerate(words)}
    )
    return with_parts(model={"type": model, "vocab": vocab, **more})


_draw = random.Random(11)
JUNK = bytes(_draw.randrange(256) for _ in range(4096))
# Tables of normalizations: junk, and sizes that lie.
LYING: list[bytes] = [
    (1 << 30).to_bytes(4, "little") + JUNK,
    (0xFFFFFFFF).to_bytes(4, "little") + JUNK,
    (8).to_bytes(4, "little") + b"\xff" * 8 + b"ab",
    (4096).to_bytes(4, "little") + JUNK,
    b"",
    JUNK,
]
# Refused by name, before the library sees them.
REFUSED: Mapping[str, Callable[[Document], Document]] = {
    "30 ByteLevel steps": with_parts(pre_tokenizer=sequence("pretokenizers", *[ORDINARY] * 30)),
    "16 ByteLevel normalizers": with_parts(
        normalizer=sequence("normalizers", *[{"type": "ByteLevel"}] * 16)
    ),
    "one to 4096": with_parts(normalizer=replace("l" * 4096, String="l")),
    "64 times 64": with_parts(
        normalizer=sequence("normalizers", *[replace("l" * 64, String="l")] * 2)
    ),
    "by a pattern": with_parts(normalizer=replace("l" * 4096, Regex=".")),
    "NFKD over a chain": with_parts(
        normalizer=sequence("normalizers", replace("ﷺ" * 32, String="l"), {"type": "NFKD"})
    ),
    "Lowercase over a chain": with_parts(
        normalizer=sequence("normalizers", replace("İ" * 60, String="l"), {"type": "Lowercase"})
    ),
    "decoder 4000": with_parts(decoder=sequence("decoders", replace("x" * 4000, String="l"))),
    "decoder 64 x 64": with_parts(
        decoder=sequence("decoders", *[replace("l" * 64, String="l")] * 2)
    ),
    "a decoder's pattern": with_parts(decoder=sequence("decoders", replace("x" * 400, Regex="."))),
    "nested": with_parts(normalizer=nested(5000 // 100)),
    "an unknown step": with_parts(normalizer={"type": "Python", "code": "import os"}),
    "an unknown decoder": with_parts(decoder={"type": "Shell"}),
    "a huge prefix": with_parts(normalizer={"type": "Prepend", "prepend": "l" * 10_000}),
    "a long word": _long_word,
    "random merges": in_model(dropout=0.5),
    "too many merges": in_model(merges=["a b"] * (MAX_MERGES + 1)),
    "lists in lists": in_model(merges=[[[]] * 1000] * 1500),
    "objects in objects": with_parts(more=[{"a": {"a": {"a": {"a": {}}}}}] * 320_000),
    "a long added token": adding("<" + "l" * 10_000 + ">"),
    "too many added tokens": adding(*(f"<{at}>" for at in range(MAX_ADDED))),
    "added tokens of too many letters": adding(*(f"<{at}{'l' * 500}>" for at in range(9000))),
    "added tokens that grow": both(
        adding(*(f"{'l' * 100}{at}" for at in range(2000)), normalized=True),
        with_parts(normalizer=replace("l" * 60, String="l")),
    ),
    "no pattern": with_parts(normalizer=replace("x", String="")),
    "a huge pattern": with_parts(pre_tokenizer=split("a" * 100_000)),
    "a huge table": with_parts(normalizer=charsmap(bytes(3 << 20))),
    "a table of long texts": with_parts(
        normalizer=known_table(bytes(1024), b"l" * 100_000 + b"\0")
    ),
    **{f"charsmap {i}": with_parts(normalizer=charsmap(data)) for i, data in enumerate(LYING)},
}
# Read in the helper process; reading this text ends in a sentence, or in ids.
CONFINED: Mapping[str, Callable[[Document], Document]] = {
    "a trie of junk": with_parts(normalizer=known_table(JUNK, b"a\0bc\0")),
    "a trie of ones": with_parts(normalizer=known_table(b"\xff" * 4096, b"a\0" * 100)),
    "quadratic": with_parts(pre_tokenizer=split(r"a*$|a")),
    "cubic": with_parts(pre_tokenizer=split(r"a*a*$|a")),
    "exponential": with_parts(pre_tokenizer=split(r"(a+)+$|a")),
    "looking ahead": with_parts(pre_tokenizer=split(r"(?=a*a*b)a|a")),
    "quadratic replacement": with_parts(normalizer=replace("a", Regex=r"a*a*b")),
    "growing": with_parts(normalizer=replace("a" * 60, String="a")),
    "pieces of every length": _pieces("Unigram", unk_id=0, byte_fallback=False),
    "words of any length": _pieces(
        "WordPiece",
        unk_token="<unk>",
        continuing_subword_prefix="",
        max_input_chars_per_word=1 << 60,
    ),
    # Published patterns, for runs that only a stranger would write.
    "runs of digits": with_parts(pre_tokenizer=split(r"\d{1,3}(?=(?:\d{3})*\b)")),
    "runs of spaces": with_parts(pre_tokenizer=split(r"\s+$")),
}
LETTERS = {"runs of digits": "1", "runs of spaces": " "}  # the others are harmed by "a"


def long_text(name: str) -> str:
    """The text that harms a case of `CONFINED`."""
    return LETTERS.get(name, "a") * 100_000 + "!"
