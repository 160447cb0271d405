"""Colours lines of code, one after the other, with pygments."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygments.lexer import Lexer

# The languages that are coloured. Each lexer is a set of patterns that a hostile answer could make slow, so these are
# few, and so are the lines and the letters that they look at.
LANGUAGES = frozenset(
    "bash c c++ cpp css cuda diff dockerfile go html ini java javascript js json kotlin lua makefile markdown md python"
    " py r ruby rust rs sh shell sql swift toml ts typescript xml yaml yml zig".split()
)
_MOST_LINES, _MOST_LETTERS = 100, 400  # lines before the last one, letters of a line


class Highlighter:
    """Colours the lines of one block of code.

    Args:
        language: the name behind the fence.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _lexer(language.lower())
        self._lines: list[str] = []

    def line(self, text: str) -> str | None:
        """Returns the next line with colours; None: it has none."""
        if self._lexer is None or len(text) > _MOST_LETTERS:
            return None
        self._lines = [*self._lines[-_MOST_LINES:], text]
        tokens: list[tuple[Any, str]] = []  # of the last line
        for kind, words in self._lexer.get_tokens("\n".join(self._lines)):
            before, newline, after = words.rpartition("\n")
            if newline and (after or len(tokens) or before):
                tokens = []
            if after:
                tokens.append((kind, after))
        return _drawn(tokens)


def _lexer(language: str) -> Lexer | None:
    if language not in LANGUAGES:
        return None
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer: Lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:  # an older pygments
        return None
    return lexer


def _drawn(tokens: list[tuple[Any, str]]) -> str:
    from pygments.formatters.terminal import TerminalFormatter

    drawn = io.StringIO()
    TerminalFormatter().format(iter(tokens), drawn)
    return drawn.getvalue()
