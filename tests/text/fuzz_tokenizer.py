"""Reads mutations of a `tokenizer.json`; run as a program, since a bug may end the process.

    python tests/text/fuzz_tokenizer.py FOLDER SEED ROUNDS

FOLDER holds an honest tokenizer. Each round replaces a few parts of it by parts of the hostile corpus, by other
parts of its own, or by numbers and texts out of place. Prints how many were refused and how many read.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from text.hostile import CONFINED, REFUSED

from ktcli.errors import BadCheckpoint
from ktcli.text.tokenizer import load_tokenizer

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 40,
    0.5,
    "",
    "Sequence",
    "\x00",
    "l" * 5000,
    [],
    {},
    [[]],
    [None] * 40,
)
TYPES = (
    "NFC NFKD Replace Precompiled ByteLevel Split Metaspace Digits Fuse ByteFallback Strip Prepend BPE Unigram "
    "WordPiece WordLevel BertNormalizer Nmt Punctuation CTC Sequence StripAccents Lowercase UnicodeScripts Whitespace"
).split()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, but the words and merges of its model, which are many."""
    if path:
        yield path
    if path in (("model", "vocab"), ("model", "merges")):
        return
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*path, index))


def mutated(honest: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    corpus = [*REFUSED.values(), *CONFINED.values()]
    made = draw.choice(corpus)(honest) if draw.random() < 0.3 else copy.deepcopy(honest)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        known = list(places(made))
        *path, last = draw.choice(known)
        holder = made
        for key in path:
            holder = holder[key]
        other = draw.choice(known)
        value: Any = made
        for key in other:
            value = value[key]
        odd = draw.choice(
            [value, draw.choice(ODD), draw.choice(TYPES), {"type": draw.choice(TYPES)}]
        )
        holder[last] = copy.deepcopy(odd)
    return made


def main(folder: Path, seed: int, rounds: int) -> None:
    path = folder / "tokenizer.json"
    honest = json.loads(path.read_text())
    draw = random.Random(seed)
    refused = read = 0
    for _ in range(rounds):
        path.write_text(json.dumps(mutated(honest, draw)))
        try:
            tokenizer = load_tokenizer(folder)
            tokenizer.decode(tokenizer.encode("hello world, 世界 <|end|>" * 50))
            read += 1
        except BadCheckpoint as error:
            assert "\n" not in str(error), repr(str(error))
            refused += 1
    print(refused, read)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
