"""Merges of a vocabulary are counted while they are made: files of runs are refused before they fill the memory."""

from __future__ import annotations

import base64
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.errors import BadCheckpoint
from ktcli.text.tokenizer import load_tokenizer
from ktcli.weights import vocabulary
from ktcli.weights.vocabulary import (
    PieceKind,
    Pieces,
    VocabularyPiece,
    document,
    splits,
)

MOST_BYTES = (
    32 << 20
)  # that refusing may take; of these two letters the merges alone took more than 100 MiB


def write_ranks(folder: Path, longest: int, letters: int) -> None:
    """A rank file with all runs of some letters, up to a length."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([97 + i]) * n for i in range(letters) for n in range(2, longest + 1)]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}')


def write_pieces(folder: Path, longest: int, letters: int) -> None:
    """A SentencePiece file with all runs of some letters, up to a length."""
    texts = [b"<unk>", b"\xe2\x96\x81", *(bytes([letter]) for letter in range(0x61, 0x7B))]
    texts += [bytes([97 + i]) * n for i in range(letters) for n in range(2, longest + 1)]
    made = b""
    for id, text in enumerate(texts):
        score, kind = struct.pack("<f", -id), bytes([2 if id == 0 else 1])
        made += part(1, part(1, text) + b"\x15" + score + b"\x18" + kind)
    (folder / "tokenizer.model").write_bytes(made + part(2, b"\x18\x02"))  # merged by scores


def part(number: int, data: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
    size, rest = b"", len(data)
    while rest > 127:
        size, rest = size + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + size + bytes([rest]) + data


@pytest.mark.parametrize("write", [write_ranks, write_pieces])
def test_runs_are_refused_before_their_merges_are_made(
    tmp_path: Path, write: Callable[[Path, int, int], None]
) -> None:
    write(tmp_path, 512, 2)
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match="merges of more than 12,000,000 letters"):
            load_tokenizer(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("write", [write_ranks, write_pieces])
def test_runs_of_published_length_are_read(
    tmp_path: Path, write: Callable[[Path, int, int], None]
) -> None:
    write(tmp_path, 128, 2)  # as the spaces and equal signs of o200k
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("a" * 128)) <= 2


@pytest.mark.parametrize(
    ("limit", "why"),
    [("MAX_ALL_LETTERS", "have .* letters"), ("MAX_MERGES", "make more than 10 merges")],
)
def test_every_bound_is_one_sentence(limit: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, limit, 10)
    taken = []
    with pytest.raises(BadCheckpoint, match=why):
        for row in splits({b"a" * n: n for n in range(1, 20)}):
            taken.append(row)
    assert len(taken) <= 10


@given(st.sets(st.text("ab", min_size=1, max_size=8), max_size=60))
@settings(max_examples=60)
def test_every_cut_into_two_tokens_is_found(texts: set[str]) -> None:
    ids = {text: id for id, text in enumerate(sorted(texts))}
    want = {(a + b, a, b) for a in ids for b in ids if a + b in ids}
    names = list(ids)
    found = [(names[whole], names[left], names[right]) for whole, left, right in splits(ids)]
    assert set(found) == want and len(found) == len(want)


def test_pieces_are_merged_best_score_first() -> None:
    texts = [("a", -1.0), ("b", -2.0), ("ab", -3.0), ("ba", -3.0), ("aba", -2.5)]
    pieces = tuple(VocabularyPiece(text, score, PieceKind.NORMAL) for text, score in texts)
    merges = document(Pieces(pieces))["model"]["merges"]
    assert merges == [["a", "ba"], ["ab", "a"], ["a", "b"], ["b", "a"]]
