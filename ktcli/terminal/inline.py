"""Reads the inline Markdown of a line as it arrives: emphasis, code, links."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

Span = tuple[str, str]  # text, and its style as SGR has it

BOLD, DIM, ITALIC, UNDERLINED, STRUCK, CODE = "1", "2", "3", "4", "9", "36"
_STYLES = {"strong": BOLD, "em": ITALIC, "s": STRUCK, "link": UNDERLINED}
_OPENERS = re.compile(r"[*_`~\[!<\\]")
_ENDS = {"*": "*", "_": "_", "`": "`", "~": "~", "[": ")", "!": ")", "<": ">"}
_ESCAPED = frozenset(string.punctuation)
_HELD = 400  # characters that may wait for the end of a construct


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").disable("entity")


class Inline:
    """Turns the text of one line into spans as soon as they are certain.

    What begins like emphasis, code or a link is held back until its end has come, or it is clear that there is none.
    """

    def __init__(self) -> None:
        self._held = ""
        self._before = " "  # the character before what is held back

    def feed(self, text: str) -> Iterator[Span]:
        """Adds a piece of a line of Markdown; yields the spans (text and style) whose style is certain now."""
        # What is held back stays short, however long a text is.
        for at in range(0, len(text), _HELD):
            self._held += text[at : at + _HELD]
            yield from self._take(last=False)

    def finish(self) -> Iterator[Span]:
        """Ends the line; yields the spans (text and style) of its text that was held back."""
        yield from self._take(last=True)

    def _take(self, *, last: bool) -> Iterator[Span]:
        while self._held:
            opener = _OPENERS.search(self._held)
            if opener is None:
                yield self._pass(len(self._held))
            elif opener.start():
                yield self._pass(opener.start())
            else:
                size = self._size(last=last)
                if size == 0:
                    return
                yield from self._construct(size) if size > 0 else (self._pass(-size),)

    def _pass(self, size: int) -> Span:
        """Takes characters as they are."""
        text, self._held = self._held[:size], self._held[size:]
        self._before = text[-1]
        return text, ""

    def _construct(self, size: int) -> Iterator[Span]:
        source, self._held = self._held[:size], self._held[size:]
        self._before = source[-1]
        yield from _spans(_parsed(source))

    def _size(self, *, last: bool) -> int:
        """The characters of the construct at the beginning; negative: of what is none; 0: that is not known yet."""
        held, first = self._held, self._held[0]
        if first == "\\":
            if len(held) == 1 and not last:
                return 0
            return 2 if held[1:2] and held[1] in _ESCAPED else -1
        run = len(held) - len(held.lstrip(first)) if first in "*_`~" else 1
        long = len(held) > _HELD
        if run == len(held) and not last:
            return -run if long else 0
        if not self._may_open(run):
            return -run
        for end in re.finditer(re.escape(_ENDS[first]) + "+", held[run:]):
            at = run + end.end()
            if at > _HELD:
                return -run
            if at == len(held) and not last:
                return 0  # the run may go on
            if held[run + end.start() - 1].isspace() and first in "*_~":
                continue  # nothing ends behind a space
            if _is_whole(_parsed(held[:at])):
                return at
        return -run if last or long or self._is_none() else 0

    def _may_open(self, run: int) -> bool:
        first, after = self._held[0], self._held[run : run + 1]
        if first == "`":
            return True
        if first == "~" and run < 2:
            return False
        if first == "_" and self._before.isalnum():
            return False
        if first == "!":
            return after == "["
        if first == "<":
            return after.isalpha()
        return bool(after) and not after.isspace()

    def _is_none(self) -> bool:
        """Returns whether what began like a link or an address is none."""
        first, held = self._held[0], self._held
        if first == "<":
            return " " in held
        if first in "[!":
            end = held.find("]")
            return 0 <= end < len(held) - 1 and held[end + 1] != "("
        return False


def _parsed(source: str) -> list[Token]:
    return _parser().parseInline(source)[0].children or []


def _is_whole(tokens: list[Token]) -> bool:
    """Returns whether tokens are one construct from end to end."""
    tokens = [token for token in tokens if token.content or token.type != "text"]
    if len(tokens) == 1:
        return tokens[0].type in ("code_inline", "image")
    depth = 0
    for i, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            return i == len(tokens) - 1 and i > 0
    return False


def _spans(tokens: list[Token]) -> Iterator[Span]:
    """The spans of tokens; the address of a link stands behind its text."""
    styles: list[str] = []
    address, words = "", ""
    for token in tokens:
        kind = token.type.removesuffix("_open").removesuffix("_close")
        if token.nesting > 0:
            styles.append(_STYLES.get(kind, ""))
            if kind == "link":
                address, words = str(token.attrs.get("href", "")), ""
        elif token.nesting < 0:
            styles.pop()
            if kind == "link" and address.removeprefix("mailto:") != words:
                yield f" ({address})", DIM
        elif token.type == "image":
            yield f"{token.content} ({token.attrs.get('src', '')})", DIM
        else:
            text = " " if token.type in ("softbreak", "hardbreak") else token.content
            words += text
            style = [*styles, CODE] if token.type == "code_inline" else styles
            yield text, ";".join(filter(None, style))
