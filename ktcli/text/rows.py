"""Finds what a question names in kt's own tables, for the built-in model, whose weights may be older than they are.

`profiles/kt-mini/rows.json` is generated from the tables that make the man page (docs/reference.py): of each command,
option, setting, variable, exit code, slash command, format, family, model and page the ways to name it and what is to
be said of it. Whatever is in them is answered rightly from the day it is there: the prompt has the row's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktcli.text.files import read_json

FILE = "rows.json"
TOLD = "Fact: "  # what a system turn with a row's text begins with; kt-mini is trained with it
MAX_PER_TOKEN = 8  # characters, of a conversation that can fit
MAX_CHARACTERS = 400  # of a question that is looked at: one that is longer asks for more than a row


@dataclass(frozen=True, slots=True)
class KnownRow:
    """What is to be said of a thing, and how it is named.

    Attributes:
        names: each a group of words or of lines to type that all have to be in the question, in lower case.
        text: whole sentences.
    """

    names: tuple[tuple[str, ...], ...]
    text: str


class KnownRows:
    """Looks up what a question names.

    Args:
        rows: those that come first are taken where a question names several as exactly.
    """

    def __init__(self, rows: Iterable[KnownRow]) -> None:
        self._rows = tuple(rows)
        words = {word for row in self._rows for name in row.names for word in name}
        longest = sorted(words, key=lambda word: (-len(word), word))
        self._named = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def find(self, question: str) -> str | None:
        """Returns what is to be said of the thing that a question names most exactly; None: it names none."""
        if len(question) > MAX_CHARACTERS:
            return None
        said = self._said(question.lower())
        named = [
            (_exactness(name), row)
            for row in self._rows
            for name in row.names
            if said.issuperset(name)
        ]
        return max(named, key=lambda each: each[0])[1].text if named else None

    def told(self, messages: Sequence[dict[str, Any]], context: int) -> list[dict[str, Any]]:
        """Returns the messages with a system turn before each question that names a row, which has the row's text.

        It follows from each question alone, so that a conversation that grows keeps its beginning.

        Args:
            context: tokens that the model can hold; texts that are far longer are not looked at.
        """
        found: list[dict[str, Any]] = []
        if sum(len(str(message.get("content"))) for message in messages) > MAX_PER_TOKEN * context:
            return list(messages)
        for message in messages:
            content = message.get("content")
            if message.get("role") == "user" and isinstance(content, str):
                text = self.find(content)
                found += [{"role": "system", "content": TOLD + text}] if text else []
            found.append(message)
        return found

    def _said(self, text: str) -> set[str]:
        """Returns the names in a text, each with nothing before or behind it that makes it another."""
        found, at = set(), 0
        while match := self._named.search(text, at):
            before, behind = text[: match.start()], text[match.end() :]
            if not re.search(r"[\w/-]$", before) and not re.match(r"[\w-]|[./]\w", behind):
                found.add(match[0])
            at = match.start() + 1
        return found


def _exactness(name: tuple[str, ...]) -> tuple[int, int]:
    """Returns what orders names: an option says more than its command, a long name more than a short one."""
    return sum(word.startswith("--") for word in name), sum(map(len, name))


def read_rows(folder: Path) -> KnownRows:
    """Returns the rows that a folder's file has.

    Raises:
        BadCheckpoint: there is no such file, or it is damaged.
    """
    return KnownRows(
        KnownRow(tuple(tuple(name) for name in names), text)
        for names, text in read_json(folder / FILE)["rows"]
    )
