r"""Shows samples to people: what is trained, what is only read, and what was left out.

A control token is written as its name; words of the data that look like one have a backslash inside: `<\|im_end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ktcli.errors import counted
from ktcli.samples.sample import Sample, SampleSet
from ktcli.text.model import TextModel
from ktcli.text.words import inserted

BEGIN, END = "⟦", "⟧"  # around what is trained, where there is no colour
# Whatever a terminal obeys, but lines and tabs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def shown(samples: SampleSet, texts: TextModel, count: int, *, colour: bool) -> str:
    """Returns the first `count` samples as text for people, followed by a summary with counts of all of them.

    Args:
        colour: whether trained text is green, and untrained control tokens are dim; else ⟦…⟧ surrounds trained text.
    """
    parts = [_one(sample, texts, colour) for sample in samples.samples[:count]]
    return "\n\n".join([*parts, _summary(samples)])


def document(samples: SampleSet, texts: TextModel, count: int) -> dict[str, Any]:
    """Returns a dict for JSON: `rows`, `samples`, `tokens` and `trained_tokens` (counts), `longest` (tokens, where),
    `dropped` (reason, rows, first), `notes`, `sha256`, and `shown`, the first `count` samples (where, ids, trained,
    parts).
    """
    longest = max(samples.samples, key=lambda each: len(each.ids))
    return {
        "rows": samples.rows,
        "samples": len(samples.samples),
        "tokens": sum(len(each.ids) for each in samples.samples),
        "trained_tokens": sum(each.trained_tokens for each in samples.samples),
        "longest": {"tokens": len(longest.ids), "where": longest.where},
        "dropped": [
            {"reason": each.reason, "rows": each.rows, "first": each.first}
            for each in samples.dropped
        ],
        "notes": list(samples.notes),
        "sha256": samples.sha256,
        "shown": [_tokens(sample, texts) for sample in samples.samples[:count]],
    }


def _tokens(sample: Sample, texts: TextModel) -> dict[str, Any]:
    return {
        "where": sample.where,
        "ids": list(sample.ids),
        "trained": list(sample.trained),
        "parts": [
            {"text": texts.tokenizer.decode(ids, special=True), "trained": trained}
            for trained, ids in _runs(sample)
        ],
    }


def _runs(sample: Sample) -> Iterator[tuple[bool, list[int]]]:
    """Yields the ids of a sample in runs that are trained or not."""
    pairs = zip(sample.trained, sample.ids, strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[0]):
        yield trained, [id for _, id in run]


def _one(sample: Sample, texts: TextModel, colour: bool) -> str:
    parts = []
    for trained, ids in _runs(sample):
        pieces = list(_pieces(ids, texts))
        if colour:
            styled = (
                _styled(text, _GREEN if trained else _DIM if control else "")
                for control, text in pieces
            )
            parts.append("".join(styled))
        else:
            text = "".join(
                text.replace(BEGIN, f"\\{BEGIN}").replace(END, f"\\{END}") for _, text in pieces
            )
            parts.append(f"{BEGIN}{text}{END}" if trained else text)
    head = f"--- {_visible(sample.where)}: {len(sample.ids):,} tokens, {sample.trained_tokens:,} trained"
    return f"{head}\n{''.join(parts)}"


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{_PLAIN}" if style else text


def _pieces(ids: list[int], texts: TextModel) -> Iterator[tuple[bool, str]]:
    """Yields the text of ids in pieces that are control tokens or are not; nothing in them is obeyed by a terminal."""
    control = texts.control.ids
    for is_control, run in groupby(ids, key=control.__contains__):
        text = texts.tokenizer.decode(list(run), special=True)
        yield is_control, _visible(text if is_control else _told_apart(text, texts))


def _told_apart(text: str, texts: TextModel) -> str:
    """Returns a text with a backslash inside of each word that looks like a control token, and is none."""
    return inserted(text, "\\", [at + 1 for at in texts.control.places(text)])


def _visible(text: str) -> str:
    return _UNSAFE.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text
    )


def _summary(samples: SampleSet) -> str:
    """Returns the counts, one line each."""
    found = samples.samples
    longest = max(found, key=lambda each: len(each.ids))
    tokens = sum(len(each.ids) for each in found)
    trained = sum(each.trained_tokens for each in found)
    lines = [
        f"{counted(samples.rows, 'row')}, {counted(len(found), 'sample')}, {counted(tokens, 'token')},"
        f" {trained:,} trained ({100 * trained / tokens:.0f} %)",
        f"the longest sample has {len(longest.ids):,} tokens: {longest.where}",
        *(
            f"{counted(each.rows, 'row')}: {each.reason} (first: {each.first})"
            for each in samples.dropped
        ),
        *samples.notes,
    ]
    return "\n".join(map(_visible, lines))
