"""Reads a SentencePiece model file (`tokenizer.model`): its pieces and how texts are prepared, as data.

The file is a protocol buffer; the few fields that matter are read here, field by field, with bounds. What
the pieces mean is the business of `ktcli.weights.vocabulary`. Source: sentencepiece_model.proto.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ktcli.errors import BadCheckpoint
from ktcli.text.files import read_bytes, read_json_if_any
from ktcli.weights.vocabulary import PieceKind, Pieces, VocabularyPiece, added_token, document

NAME = "tokenizer.model"
MAX_BYTES = 64_000_000  # published ones reach 5 MB
MAX_PIECES = 1 << 20
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType

Value = int | bytes


def document_of(path: Path, config: Path) -> str:
    """Returns the text of a `tokenizer.json` that is equivalent to a SentencePiece model file.

    Args:
        config: its tokenizer_config.json, which may add tokens and says whether spaces are put in front of
            what follows a special token ("legacy").
    Raises:
        BadCheckpoint: it is malformed, or of a kind that cannot be read.
    """
    settings = read_json_if_any(config)
    pieces = replace(read_pieces(path), first_only=settings.get("legacy") is False)
    made = document(pieces)
    ids = {piece.text: id for id, piece in enumerate(pieces.pieces)}
    rows = {row["content"]: row for row in made["added_tokens"]}
    given = settings.get("added_tokens_decoder")
    for row in given.values() if isinstance(given, dict) else ():
        text = row.get("content") if isinstance(row, dict) else None
        if isinstance(text, str) and text:
            special = row.get("special") is True
            id = ids.setdefault(text, len(ids))
            rows[text] = added_token(id, text, special=special)
    made["added_tokens"] = sorted(rows.values(), key=lambda row: int(row["id"]))
    return json.dumps(made)


def read_pieces(path: Path) -> Pieces:
    """Returns the pieces of a SentencePiece model file and its settings for preparing texts.

    Raises:
        BadCheckpoint: it is malformed, or a model by words or by letters.
    """
    data = read_bytes(path, MAX_BYTES)
    try:
        return _parse(data, path)
    except (ValueError, struct.error) as error:
        raise BadCheckpoint(f"{path} is not a SentencePiece model: {error}") from error


def _parse(data: bytes, path: Path) -> Pieces:
    pieces: list[VocabularyPiece] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            if len(pieces) == MAX_PIECES:
                raise ValueError(f"it has more than {MAX_PIECES} pieces")
            pieces.append(_piece(dict(_fields(value))))
        elif number in (2, 3) and isinstance(value, bytes):
            (trainer if number == 2 else normalizer).update(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise BadCheckpoint(f"{path} is a SentencePiece model of kind {kind!r}; kt reads 1 and 2")
    if not pieces:
        raise ValueError("it has no pieces")
    charsmap = normalizer.get(2, b"")
    return Pieces(
        tuple(pieces),
        unigram=kind == _UNIGRAM,
        prefix=bool(normalizer.get(3, True)),
        single_spaces=bool(normalizer.get(4, True)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
    )


def _piece(fields: dict[int, Value]) -> VocabularyPiece:
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    kind = fields.get(3, PieceKind.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of the wrong type")
    return VocabularyPiece(text.decode("utf-8"), struct.unpack("<f", score)[0], PieceKind(kind))


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yields (number, value) of each field of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            size, at = _varint(data, at)
        elif key & 7 in (1, 5):
            size = 8 if key & 7 == 1 else 4
        else:
            raise ValueError(f"a field has the wire type {key & 7}")
        if size > len(data) - at:
            raise ValueError("a field ends beyond the end of the file")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a number of 7 bits a byte, lowest first; returns it and the offset after it."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("a number has more than ten bytes")
