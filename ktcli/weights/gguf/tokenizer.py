"""The tokenizer and chat template in a GGUF file, as the small files of a model on the hub.

Two kinds are read: "gpt2", bytes merged by a list of pairs, and "llama", SentencePiece pieces merged by
score, with single bytes for what has no piece. Both become a `tokenizer.json`, so that a pack needs nothing
but its own files. Sources: the specification of GGUF; the tokenizers library's file format; SentencePiece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_VOCAB, Fields
from ktcli.weights.gguf.words import WORDS
from ktcli.weights.vocabulary import (
    MAX_MERGES,
    PieceKind,
    Pieces,
    VocabularyPiece,
    added_tokens,
    bpe,
    byte_level,
    steps,
    whole,
)

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
TEMPLATE = "chat_template.jinja"  # the file that it becomes


def small_files(values: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """Returns the tokenizer, chat template and sampling settings in a GGUF file's metadata in the form of hub files:
    contents by file name, such as "tokenizer.json". Without a template or a tokenizer in the metadata, its files are
    left out.

    Args:
        values: the metadata by key.
        where: the name of the file, for errors.
    Raises:
        BadCheckpoint: a value is of the wrong type, or the tokenizer is of a kind that kt does not read.
    """
    fields = Fields(values, where)
    files = {"generation_config.json": _generation(fields)}
    template = fields.text(_TEMPLATE, "")
    if template:
        files[TEMPLATE] = template.encode()
    kind = fields.text(f"{_KEY}model", "no_vocab")
    if kind == "no_vocab":
        return files
    tokens = _tokens(fields)
    if kind == "gpt2":
        model = _merged_bytes(fields, tokens)
    elif kind == "llama":
        model = _pieces(fields, tokens)
    else:
        raise BadCheckpoint(
            f"{where} has a tokenizer of the kind {kind[:40]!r}", hint="kt reads gpt2 and llama"
        )
    document = whole(added_tokens(tokens), model)
    files["tokenizer.json"] = json.dumps(document, ensure_ascii=False).encode()
    files["tokenizer_config.json"] = _settings(fields, tokens)
    return files


def small_file_names(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the files that `small_files` makes of a GGUF file's metadata `values`, without making
    them."""
    names = ["generation_config.json"]
    names += [TEMPLATE] * bool(values.get(_TEMPLATE))
    known = values.get(f"{_KEY}model", "no_vocab") != "no_vocab"
    return (*names, *(("tokenizer.json", "tokenizer_config.json") if known else ()))


_Tokens = list[tuple[str, PieceKind]]


def _tokens(fields: Fields) -> _Tokens:
    """The text and the kind of each token, by id."""
    texts = _array(fields, "tokens", str)
    kinds = _array(fields, "token_type", int) if fields.has(f"{_KEY}token_type") else []
    kinds = kinds or [PieceKind.NORMAL] * len(texts)
    if not 0 < len(texts) <= MAX_VOCAB or len(kinds) != len(texts):
        raise BadCheckpoint(
            f"{fields.where} lists {len(texts)} tokens but {len(kinds)} token types"
        )
    if len(set(texts)) != len(texts):
        seen: set[str] = set()
        twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise BadCheckpoint(f"{fields.where} lists the token {twice[:40]!r} twice")
    known = {int(kind): kind for kind in PieceKind}
    return [
        (text, known.get(kind, PieceKind.NORMAL)) for text, kind in zip(texts, kinds, strict=True)
    ]


def _array(fields: Fields, key: str, kind: type) -> list[Any]:
    value = fields.values.get(_KEY + key)
    if not isinstance(value, list) or not all(type(each) is kind for each in value):
        raise BadCheckpoint(f"{fields.where}: {_KEY}{key} is not a list of {kind.__name__}")
    return value


def _merged_bytes(fields: Fields, tokens: _Tokens) -> dict[str, Any]:
    """The model and the steps of a byte-level tokenizer."""
    name = fields.text(f"{_KEY}pre", "none")
    words = WORDS.get(name)
    if words is None:
        raise BadCheckpoint(
            f"{fields.where} uses the pre-tokenizer {name[:40]!r}, which kt does not support",
            hint=f"kt knows {', '.join(sorted(WORDS))}",
        )
    merges = _array(fields, "merges", str)
    if len(merges) > MAX_MERGES:
        raise BadCheckpoint(f"{fields.where} has {len(merges):,} merges, more than {MAX_MERGES:,}")
    bad = next((merge for merge in merges if merge.count(" ") != 1), None)
    if bad is not None:
        raise BadCheckpoint(f"{fields.where} has the invalid merge {bad[:40]!r}")
    model = bpe(
        [text for text, _ in tokens],
        [merge.split(" ") for merge in merges],
        ignore_merges=words.ignore_merges,
    )
    return byte_level(words.patterns, model, nfc=words.nfc)


def _pieces(fields: Fields, tokens: _Tokens) -> dict[str, Any]:
    """The model and the steps of a SentencePiece tokenizer."""
    scores = _array(fields, "scores", float)
    if len(scores) != len(tokens):
        raise BadCheckpoint(f"{fields.where} has {len(scores)} scores for {len(tokens)} tokens")
    joined = [
        score
        for (text, kind), score in zip(tokens, scores, strict=True)
        if kind == PieceKind.NORMAL and len(text) > 1
    ]
    if not all(map(isfinite, scores)) or (len(joined) > 1 and len(set(joined)) == 1):
        what = (
            "one score to all tokens"
            if all(map(isfinite, scores))
            else "scores that are not numbers"
        )
        raise BadCheckpoint(
            f"{fields.where}: {_KEY}scores gives {what}, so the order of merges is unknown",
            hint="use another release: the converter of this one did not read the original tokenizer.model",
        )
    pairs = zip(tokens, scores, strict=True)
    pieces = tuple(VocabularyPiece(text, score, kind) for (text, kind), score in pairs)
    return steps(Pieces(pieces, prefix=fields.flag(f"{_KEY}add_space_prefix", True)))


def _settings(fields: Fields, tokens: _Tokens) -> bytes:
    """`tokenizer_config.json`: the tokens that templates name."""
    settings: dict[str, Any] = {}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for key, name in names.items():
        if fields.has(f"{_KEY}{key}_token_id"):
            id = fields.whole(f"{_KEY}{key}_token_id", low=0, high=1 << 32)
            if id < len(tokens):  # 2^32 - 1 and the like mean none
                settings[name] = tokens[id][0]
    for key in ("add_bos_token", "add_eos_token"):
        if fields.has(_KEY + key):
            settings[key] = fields.flag(_KEY + key, False)
    return json.dumps(settings, ensure_ascii=False, indent=1).encode()


def _generation(fields: Fields) -> bytes:
    """`generation_config.json`: the tokens that end an answer, and the makers' sampling settings where the file has
    them."""
    config: dict[str, Any] = {}
    if fields.has(f"{_KEY}bos_token_id"):
        config["bos_token_id"] = fields.whole(f"{_KEY}bos_token_id", low=0, high=1 << 32)
    ends = [f"{_KEY}{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = {fields.whole(key, low=0, high=1 << 32) for key in ends if fields.has(key)}
    config["eos_token_id"] = sorted(ids)
    rows = {
        "temperature": "temp",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "penalty_repeat",
    }
    for name, key in rows.items():
        if fields.has(f"general.sampling.{key}"):
            value = fields.number(f"general.sampling.{key}")
            config[name] = int(value) if name == "top_k" else float(f"{value:.7g}")
    if config.get("temperature", 0) > 0:
        config["do_sample"] = True
    return json.dumps(config, indent=1).encode()
