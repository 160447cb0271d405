"""Reads tiktoken rank files for the tokenizers library: Kimi-K2 publishes nothing else.

A rank file has one token per line, base64 and its rank. How text is cut into words before merging is
not in any data file, only in the repository's Python, which is never run: so it is a row of a table
here, found by the name of the tokenizer class.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.text.components import is_text
from ktcli.text.files import read_bytes, read_json
from ktcli.weights.gguf.words import KIMI
from ktcli.weights.vocabulary import MAX_LETTERS, added_token, bpe, byte_level, splits, whole

MAX_BYTES = 8_000_000  # Kimi-K2's has 2.8 MB
NAMES = ("tiktoken.model",)

# Class in tokenizer_config.json → how words are cut, and how many special ids follow the ranks.
PATTERNS: dict[str, tuple[str, int]] = {"TikTokenTokenizer": (KIMI, 256)}


def find(folder: Path) -> Path | None:
    """Returns the path of the tiktoken rank file in a model's folder; None if there is none."""
    named = [folder / name for name in NAMES if (folder / name).is_file()]
    return next(iter([*named, *sorted(folder.glob("*.tiktoken"))]), None)


def document(path: Path, config: Path) -> str:
    """Returns the text of a `tokenizer.json` that is equivalent to a tiktoken rank file.

    Tiktoken joins the two neighbours whose union has the lowest rank, however the union is split; so every split into
    two tokens is a merge, and merges are ordered by the rank of the union.

    Args:
        config: its tokenizer_config.json: the class, and the names of special tokens.
    Raises:
        BadCheckpoint: the file is malformed, too large, or of a class that is not in the table.
    """
    settings = read_json(config)
    kind = str(settings.get("tokenizer_class"))
    if kind not in PATTERNS:
        raise BadCheckpoint(
            f"{path} needs the tokenizer class {kind[:60]!r}, which is code that kt does not run",
            hint="a repository with a tokenizer.json works",
        )
    pattern, reserved = PATTERNS[kind]
    ranks = read_ranks(path)
    alphabet = letters()
    words = ["".join(alphabet[byte] for byte in token) for token in ranks]
    merges = [[words[left], words[right]] for _, left, right in sorted(splits(ranks))]
    names = _special_names(settings, len(ranks), reserved)
    for text, _ in names:
        if not is_text(text):
            raise BadCheckpoint(f"{config} adds the token {text!r}, which is not Unicode text")
    added = [
        added_token(id, text, special=special)
        for id, (text, special) in enumerate(names, len(ranks))
    ]
    return json.dumps(whole(added, byte_level([pattern], bpe(words, merges, ignore_merges=True))))


def read_ranks(path: Path) -> dict[bytes, int]:
    """Returns the tokens of a tiktoken rank file, as bytes, with their ranks 0 to n - 1; every single byte is among
    them.

    Raises:
        BadCheckpoint: it is not such a file.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_BYTES).splitlines(), 1):
        word, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(word, validate=True)
            value = int(rank)
        except (binascii.Error, ValueError) as error:
            raise BadCheckpoint(f"line {number} of {path} is not a token and its rank") from error
        if value != len(ranks) or token in ranks or not 0 < len(token) <= MAX_LETTERS:
            raise BadCheckpoint(f"line {number} of {path} is out of order")
        ranks[token] = value
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise BadCheckpoint(f"{path} lacks tokens for single bytes")
    return ranks


def _special_names(settings: dict[str, Any], first: int, count: int) -> list[tuple[str, bool]]:
    """Returns the texts of the ids that follow the ranks, and whether they are left out of an answer."""
    given = settings.get("added_tokens_decoder")
    rows = given if isinstance(given, dict) else {}
    names = []
    for id in range(first, first + count):
        row = rows.get(str(id))
        text = row.get("content") if isinstance(row, dict) else None
        special = not isinstance(row, dict) or row.get("special", True) is not False
        names.append((text if isinstance(text, str) else f"<|reserved_token_{id}|>", special))
    return names


def letters() -> list[str]:
    """Returns, for each byte from 0 to 255, the printable character that represents it in a byte-level vocabulary
    (GPT-2's table).
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
