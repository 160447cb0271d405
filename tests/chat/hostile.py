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


def _long_word(document: Document) -> Document:
    made = copy.deepcopy(document)
    made["model"]["vocab"]["l" * 1_000_000] = len(made["model"]["vocab"]) + 50
    return made


def _dropout(document: Document) -> Document:
    made = copy.deepcopy(document)
    made["model"]["dropout"] = 0.5
    return made


_draw = random.Random(11)
JUNK = bytes(_draw.randrange(256) for _ in range(4096))
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
    "random merges": _dropout,
    "no pattern": with_parts(normalizer=replace("x", String="")),
    "a huge pattern": with_parts(pre_tokenizer=split("a" * 100_000)),
    "a huge table": with_parts(normalizer=charsmap(bytes(3 << 20))),
}
# Read in the helper process; reading this text ends in a sentence, or in ids.
_LYING = [
    (1 << 30).to_bytes(4, "little") + JUNK,
    (0xFFFFFFFF).to_bytes(4, "little") + JUNK,
    (8).to_bytes(4, "little") + b"\xff" * 8 + b"ab\0",
    (4096).to_bytes(4, "little") + JUNK,
    b"",
    JUNK,
]
CONFINED: Mapping[str, Callable[[Document], Document]] = {
    **{f"charsmap {i}": with_parts(normalizer=charsmap(data)) for i, data in enumerate(_LYING)},
    "quadratic": with_parts(pre_tokenizer=split(r"a*$|a")),
    "cubic": with_parts(pre_tokenizer=split(r"a*a*$|a")),
    "exponential": with_parts(pre_tokenizer=split(r"(a+)+$|a")),
    "looking ahead": with_parts(pre_tokenizer=split(r"(?=a*a*b)a|a")),
    "quadratic replacement": with_parts(normalizer=replace("a", Regex=r"a*a*b")),
}
LONG = "a" * 100_000 + "!"
