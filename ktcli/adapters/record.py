"""Finds out what an adapter was trained on, if its folder says so, from model cards and the files of LLaMA-Factory.

Nothing depends on it; a file that cannot be read says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ktcli.errors import BadCheckpoint
from ktcli.weights.documents import inside
from ktcli.weights.header import is_regular, read_bounded

CARD, ARGUMENTS = "README.md", "training_args.yaml"
RECORDS = (CARD, ARGUMENTS, "all_results.json")  # small files that an import keeps
MAX_BYTES = 1_000_000
_MOST, _LONGEST = 20, 200  # data sets, and characters of a name
_FRONT = re.compile(r"---\n(.{0,20000}?)\n---", re.DOTALL)
_LISTED = re.compile(r"^datasets?:[ \t]*\n((?:[ \t]*-[ \t]+.+\n?)+)", re.MULTILINE)
_GIVEN = re.compile(r"^datasets?:[ \t]*([^\s#].*)$", re.MULTILINE)
# The sentence of LLaMA-Factory's and transformers' cards.
_SENTENCE = re.compile(r"fine-tuned version of .{1,300}? on the (.{1,1000}?) datasets?\.")


def records_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of those files in a folder that record how the adapter was trained: the model card, training
    arguments and results, each of at most MAX_BYTES.
    """
    found = []
    for name in RECORDS:
        try:
            path = inside(folder, name)
        except BadCheckpoint:
            continue
        if is_regular(path) and path.stat().st_size <= MAX_BYTES:
            found.append(name)
    return tuple(found)


def trained_on(folder: Path) -> tuple[str, ...]:
    """Returns the names of the data sets that an adapter was trained on, at most 20, as its model card or training
    arguments name them; () if they name none.
    """
    names = dict.fromkeys(_clean(name) for name in _named(folder))
    return tuple(name for name in names if name)[:_MOST]


def _named(folder: Path) -> Iterator[str]:
    card = _text(folder, CARD)
    front = _FRONT.match(card)
    if front and (listed := _LISTED.search(front[1] + "\n")):
        yield from re.findall(r"-[ \t]+(.+)", listed[1])
    elif front and (given := _GIVEN.search(front[1])):
        yield given[1]
    if sentence := _SENTENCE.search(card):
        yield from re.split(r", the | and the |, ", sentence[1])
    if given := _GIVEN.search(_text(folder, ARGUMENTS)):
        yield from given[1].split(",")


def _text(folder: Path, name: str) -> str:
    try:
        return read_bounded(inside(folder, name), MAX_BYTES).decode("utf-8", "replace")
    except BadCheckpoint:
        return ""


def _clean(name: str) -> str:
    name = name.strip().strip("\"'[]").strip()
    return name if name.isprintable() and len(name) <= _LONGEST else ""
