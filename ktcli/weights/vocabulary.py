"""Converts SentencePiece vocabularies to documents of the tokenizers library (`tokenizer.json`).

A vocabulary is a list of pieces with scores; others read it from its file (`tokenizer.model`, GGUF). Sources:
sentencepiece_model.proto; the tokenizers library's file format.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

from ktcli.errors import BadCheckpoint
from ktcli.records import dataclass

SPACE = "\u2581"  # stands for a space in a piece
MAX_LETTERS = 512  # of a token; behind so many no merge is tried
# Of all tokens that are merged; a vocabulary of 200,000 tokens has 1.4 million.
MAX_ALL_LETTERS = 4_000_000
MAX_MERGES = 700_000  # a vocabulary of 256,000 pieces makes 580,000
MAX_MERGE_LETTERS = 12_000_000  # of all merges; a vocabulary of 200,000 tokens makes 3.2 million

Json = dict[str, Any]
Word = TypeVar("Word", str, bytes)


class PieceKind(IntEnum):
    """The kind of a piece; GGUF files number them the same way."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never part of an answer
    USER_DEFINED = 4  # taken whole wherever it stands in a text
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    """One token: its text, its score and its kind."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary with the settings of its normalization.

    Attributes:
        pieces: the tokens by id.
        unigram: whether the likeliest cut is taken; otherwise neighbours are joined, the best union first.
        prefix: whether a space is put before a text.
        first_only: whether texts that follow a special token get no such space.
        single_spaces: whether runs of spaces become one, and those at the ends none.
        charsmap: the normalisation of characters in the file's binary form; b"": none.
    """

    pieces: tuple[VocabularyPiece, ...]
    unigram: bool = False
    prefix: bool = True
    first_only: bool = False
    single_spaces: bool = False
    charsmap: bytes = b""


def document(vocabulary: Pieces) -> Json:
    """Returns the whole `tokenizer.json` object for a vocabulary of SentencePiece pieces. Raises BadCheckpoint as
    `splits`."""
    texts = [(piece.text, piece.kind) for piece in vocabulary.pieces]
    return whole(added_tokens(texts), steps(vocabulary))


def whole(added: list[Json], steps: Json) -> Json:
    """Returns a `tokenizer.json` object with these added tokens and these steps: the fields normalizer, pre_tokenizer,
    model, decoder."""
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **steps}


def added_tokens(tokens: Sequence[tuple[str, PieceKind]]) -> list[Json]:
    """Returns the `added_tokens` entries of a `tokenizer.json`: one for each control, unknown or user-defined token,
    which are recognised in a text before it is split.

    Args:
        tokens: the text and the kind of each token, by id.
    """
    return [
        added_token(id, text, special=kind != PieceKind.USER_DEFINED)
        for id, (text, kind) in enumerate(tokens)
        if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.USER_DEFINED) and text
    ]


def added_token(id: int, text: str, *, special: bool) -> Json:
    """Returns the `added_tokens` entry of a `tokenizer.json` for one token that is recognised in a text before it is
    split."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": text, **flags, "special": special}


def steps(vocabulary: Pieces) -> Json:
    """Returns the fields normalizer, pre_tokenizer, post_processor (None), decoder and model of a `tokenizer.json` for
    a vocabulary of SentencePiece pieces. Raises BadCheckpoint as `splits`."""
    before, cut = _spaces(vocabulary)
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*_cleaning(vocabulary), *before]},
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _unigram(vocabulary) if vocabulary.unigram else _merged(vocabulary),
    }


def bpe(texts: Sequence[str], merges: list[list[str]], **more: Any) -> Json:
    """Returns the `model` object of a `tokenizer.json` for BPE, which joins pairs of neighbouring tokens.

    Args:
        texts: the text of each token, by id.
        merges: the pairs, the first to be joined first.
        more: fields of the object that differ from the usual ones.
    """
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: id for id, text in enumerate(texts)},
        "merges": merges,
        **more,
    }


def byte_level(patterns: Sequence[str], model: Json, *, nfc: bool = False) -> Json:
    """Returns the fields normalizer, pre_tokenizer, post_processor (None), decoder and model of a `tokenizer.json` for
    a byte-level vocabulary.

    Args:
        patterns: regular expressions that cut words; each cuts the pieces that the ones before left whole.
        model: the model, as `bpe` returns it.
        nfc: whether texts are normalised to NFC.
    """
    cuts = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    before = {"type": "Sequence", "pretokenizers": [*cuts, {**level, "use_regex": False}]}
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": model,
    }


def splits(ids: Mapping[Word, int]) -> Iterator[tuple[int, int, int]]:
    """Yields the ids of (token, left part, right part) for every way to cut a token into two tokens, of which the left
    one is shorter than MAX_LETTERS.

    The output is bounded, since a small file can give more than memory holds.

    Args:
        ids: the tokens that take part, all of bytes or all of letters.
    Raises:
        BadCheckpoint: there are more letters or merges than any published vocabulary has.
    """
    letters = sum(map(len, ids))
    if letters > MAX_ALL_LETTERS:
        raise _too_many(f"have {letters:,} letters, more than {MAX_ALL_LETTERS:,}")
    merges = letters = 0
    for token, id in ids.items():
        for cut in range(1, min(len(token), MAX_LETTERS)):
            left = ids.get(token[:cut])
            right = None if left is None else ids.get(token[cut:])
            if left is None or right is None:
                continue
            merges, letters = merges + 1, letters + len(token)
            if merges > MAX_MERGES:
                raise _too_many(f"make more than {MAX_MERGES:,} merges")
            if letters > MAX_MERGE_LETTERS:
                raise _too_many(f"make merges of more than {MAX_MERGE_LETTERS:,} letters")
            yield id, left, right


def _too_many(what: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"the tokenizer's tokens {what}",
        hint="kt verify MODEL checks the files; kt pull gets them again",
    )


def _cleaning(vocabulary: Pieces) -> list[Json]:
    made: list[Json] = []
    if vocabulary.charsmap:
        charsmap = base64.b64encode(vocabulary.charsmap).decode()
        made.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if vocabulary.single_spaces:
        made.append({"type": "Strip", "strip_left": True, "strip_right": True})
        made.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return made


def _spaces(vocabulary: Pieces) -> tuple[list[Json], Json | None]:
    """The steps that spell spaces: those of the normalizer, and the pre-tokenizer."""
    if vocabulary.prefix and vocabulary.first_only:
        first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first"}
        return [], {**first, "split": False}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if vocabulary.prefix else []
    return [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}], None


def _merged(vocabulary: Pieces) -> Json:
    """The model of a vocabulary whose pieces are merged. SentencePiece joins the two neighbours whose union has the
    highest score; so every split of a piece into two pieces is a merge, and merges are ordered by the score of the
    union.

    Raises:
        BadCheckpoint: as `splits`.
    """
    pieces = vocabulary.pieces
    usable = (PieceKind.NORMAL, PieceKind.UNUSED)
    ids = {piece.text: id for id, piece in enumerate(pieces) if piece.kind in usable}
    found = sorted(
        splits(ids), key=lambda row: (-pieces[row[0]].score, row[1], pieces[row[2]].text)
    )
    merges = [[pieces[left].text, pieces[right].text] for _, left, right in found]
    unknown = next((piece.text for piece in pieces if piece.kind == PieceKind.UNKNOWN), None)
    texts = [piece.text for piece in pieces]
    return bpe(texts, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _unigram(vocabulary: Pieces) -> Json:
    pieces = vocabulary.pieces
    return {
        "type": "Unigram",
        "unk_id": next(
            (i for i, piece in enumerate(pieces) if piece.kind == PieceKind.UNKNOWN), None
        ),
        "vocab": [[piece.text, piece.score] for piece in pieces],
        "byte_fallback": any(piece.kind == PieceKind.BYTE for piece in pieces),
    }
