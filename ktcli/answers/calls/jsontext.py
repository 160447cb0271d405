"""Follows the text of a JSON value as it arrives, so that its end is known before it is parsed."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\{}\[\]]+')
_IN_TEXT = re.compile(r'[^"\\]+')


class JsonValue:
    """Finds the end of a JSON object or list whose text comes in pieces.

    Attributes:
        ended: whether it is whole.
    """

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_text = self._escaped = False

    def take(self, text: str) -> int:
        """Reads more text; returns the number of its characters that belong to the value. It begins with a bracket."""
        at = 0
        while at < len(text) and not self.ended:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            plain = (_IN_TEXT if self._in_text else _PLAIN).match(text, at)
            if plain is not None:
                at = plain.end()
                continue
            self._turn(text[at])
            at += 1
        return at

    def _turn(self, letter: str) -> None:
        if letter == '"':
            self._in_text = not self._in_text
        elif letter == "\\":
            self._escaped = self._in_text
        elif not self._in_text:
            self._depth += 1 if letter in "{[" else -1
            self.ended = self._depth <= 0
