"""Determines the kind of a Markdown line from as few of its characters as possible."""

from __future__ import annotations

import re
from enum import Enum

from ktcli.records import dataclass

_QUOTE = re.compile(r"[ \t]{0,3}> ?")
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$")
_MARKER = re.compile(r"(?:(?P<bullet>[-*+])|(?P<number>\d{1,9}[.)]))[ \t]+(?=\S)")
_HEADING = re.compile(r"(#{1,6})[ \t]+(?=\S)")
_TASK = re.compile(r"\[([ xX])\][ \t]+(?=\S)")
_RULE = re.compile(r"([-*_])[ \t]*(?:\1[ \t]*){2,}$")
# What has come may still become a heading, an item, a fence, a rule.
_UNCERTAIN = re.compile(
    r"(?:#{1,6}[ \t]*|([-*_])[ \t]*(?:\1[ \t]*)*|\+[ \t]*|\d{1,9}(?:[.)][ \t]*)?|`{1,2}|~{1,2})$"
)
_UNCERTAIN_TASK = re.compile(r"(?:\[(?:[ xX](?:\][ \t]*)?)?)$")
_BULLETS = ("•", "◦", "▪")
_MOST_INDENT = 24  # columns
_MOST_QUOTES = 12  # one in the other
_MOST_UNCERTAIN = 200  # characters


class LineKind(Enum):
    """The kinds of lines that Markdown has."""

    TEXT = "text"  # of a paragraph, an item, a quote
    HEADING = "heading"
    FENCE = "fence"  # before a block of code
    ROW = "row"  # of a table
    RULE = "rule"


@dataclass(frozen=True, slots=True)
class LineStart:
    """A line of Markdown whose kind is certain, even before its end has arrived.

    Attributes:
        body: what has come of its text; for a fence the marks and what stands behind them.
        first, rest: what stands before the text, and before the lines that it is broken into.
        level: of a heading, 1 to 6.
    """

    kind: LineKind
    body: str
    first: str = ""
    rest: str = ""
    level: int = 0


def classify(source: str, *, last: bool) -> LineStart | None:
    """Returns the kind of a line of Markdown that begins with `source` (text, heading, fence, table row, rule), its
    text so far, and the texts to draw before it; None if the kind depends on the rest of the line.

    Args:
        last: whether `source` is the whole line.
    """
    quotes, body = "", source
    while len(quotes) < 2 * _MOST_QUOTES and (quote := _QUOTE.match(body)):
        quotes, body = quotes + "│ ", body[quote.end() :]
    text = body.lstrip(" \t")
    indent = quotes + " " * min(len(body[: len(body) - len(text)].expandtabs(4)), _MOST_INDENT)
    if not text:
        return LineStart(LineKind.TEXT, "", quotes, quotes) if last else None
    if not quotes and text[0] == "|":
        return LineStart(LineKind.ROW, text)
    if not quotes and text.startswith(("```", "~~~")):
        if last and _FENCE.match(text):
            return LineStart(LineKind.FENCE, text, indent)
        if not last and (text[0] == "~" or "`" not in text.lstrip("`")):
            return None
    if last and _RULE.match(text):
        return LineStart(LineKind.RULE, "", quotes)
    if not last and len(text) <= _MOST_UNCERTAIN and _UNCERTAIN.match(text):
        return None
    if heading := _HEADING.match(text):
        return LineStart(LineKind.HEADING, text[heading.end() :], quotes, quotes, len(heading[1]))
    marker = _MARKER.match(text)
    if marker is None:
        return LineStart(LineKind.TEXT, text, indent, indent)
    body = text[marker.end() :]
    word = marker["number"] or _BULLETS[len(indent) // 2 % len(_BULLETS)]
    if task := _TASK.match(body):
        word, body = "☐" if task[1] == " " else "☑", body[task.end() :]
    elif not last and _UNCERTAIN_TASK.match(body):
        return None
    return LineStart(LineKind.TEXT, body, f"{indent}{word} ", indent + " " * (len(word) + 1))


def fence_of(body: str) -> tuple[str, str]:
    """Returns the marks of a fence, such as "```", and the name of the language behind them; the name is empty if there
    is none.
    """
    found = _FENCE.match(body)
    assert found is not None
    return found[1], found[2]


def closes(line: str, marks: str) -> bool:
    """Returns whether a line ends the block of code that began with the fence `marks`."""
    text = line.strip()
    return len(text) >= len(marks) and not text.strip(marks[0])
