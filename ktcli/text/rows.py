"""Finds the row of kt's own tables that a question names, for the built-in model, whose weights may be older than the
tables.

`profiles/kt-mini/rows.json` is generated from the tables that make the man page (docs/reference.py): of each command,
option, setting, variable, exit code, slash command, format, family, model and page the ways to name it and what is to
be said of it. Whatever is in them is answered rightly from the day it is there: the prompt has the row's text, and the
answer is held to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ktcli.records import dataclass
from ktcli.text.files import read_json

FILE = "rows.json"
TOLD = "Fact: "  # what a system turn with a row's text begins with; kt-mini is trained with it
MAX_PER_TOKEN = 8  # characters, of a conversation that can fit
MAX_CHARACTERS = 400  # of a question that is looked at: one that is longer asks for more than a row
# First tokens of an answer that are the row's before all others are. Of 150 told questions of the training text whose
# answer is another one, none shares more than 3 first tokens with the row.
LEAD = 6
# A question of these words and a name asks what the named thing is, and nothing else.
ASKING = frozenset(
    """
    a about again an and are be briefly can command could define definition describe description did do does exactly
    explain explanation flag for format good hello help hey hi how i idea in information is it kind know kt me mean
    meaning means meant now of ok on one option page parameter please point purpose question remind s sentence
    setting short should slash so sort stand stands switch tell thank thanks that the then thing this to type us
    usage use used useful variable want was we what whats with word work works would you
    """.split()
)


Name = tuple[str, ...]  # words or lines to type, all of which have to be in a question


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row of a table of answers: a subject, its names, and the text about it.

    Attributes:
        names: the ways to name it, in lower case.
        text: whole sentences.
    """

    names: tuple[Name, ...]
    text: str


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The answer to a question that names a row: the row's text.

    Attributes:
        lead: the number of the answer's first tokens from which it is seen that it is this text, all of which then
            follows; 0: it is, whatever the model would say.
    """

    text: str
    lead: int = 0


class KnownRows:
    """Looks up the rows that questions name.

    Args:
        rows: those that come first are taken where a question names several as exactly.
    """

    def __init__(self, rows: Iterable[KnownRow]) -> None:
        self._rows = tuple(rows)
        self._words = frozenset(word for row in self._rows for name in row.names for word in name)
        # By the first character, the longest first. A regular expression of all words takes 20 ms to compile.
        self._lengths: dict[str, list[int]] = {}
        for first, length in sorted({(word[0], len(word)) for word in self._words if word}):
            self._lengths.setdefault(first, []).insert(0, length)
        # A conversation is rendered again and again; a question takes a millisecond.
        self._named_in = lru_cache(maxsize=256)(self._look_for_name)

    def find(self, question: str) -> str | None:
        """Returns the text of the table row that a question names; if it names several, of the one whose name has the
        most command-line options, then the most letters. None if it names none or has over 400 characters.
        """
        found = self._named_in(question)
        return found[1].text if found else None

    def answer(self, messages: Sequence[dict[str, Any]], context: int) -> KnownAnswer | None:
        """Returns the answer to a question, the last of `messages`, that names a table row: the row's text; None if it
        names none, or the messages are far longer than the context.

        If the question asks for more than the row, the answer counts only if the model itself begins with its first 6
        tokens (see `KnownAnswer.lead`).

        Args:
            context: as in `told`.
        """
        last = messages[-1] if messages else {}
        question = last.get("content")
        if last.get("role") != "user" or not isinstance(question, str) or _fills(messages, context):
            return None
        if (found := self._named_in(question)) is None:
            return None
        name, row = found
        return KnownAnswer(row.text, 0 if self._asks_only(question.lower(), name) else LEAD)

    def told(self, messages: Sequence[dict[str, Any]], context: int) -> list[dict[str, Any]]:
        """Returns the messages with a system message before each question that names a table row: the row's text.

        Args:
            context: tokens that the model can hold; messages of more than 8 characters for each are returned unchanged.
        """
        found: list[dict[str, Any]] = []
        if _fills(messages, context):
            return list(messages)
        for message in messages:
            content = message.get("content")
            if message.get("role") == "user" and isinstance(content, str):
                text = self.find(content)
                found += [{"role": "system", "content": TOLD + text}] if text else []
            found.append(message)
        return found

    def _look_for_name(self, question: str) -> tuple[Name, KnownRow] | None:
        """Returns the row that a question names most exactly, and the name."""
        if len(question) > MAX_CHARACTERS:
            return None
        said = {word for _, word in self._said(question.lower())}
        named = [(name, row) for row in self._rows for name in row.names if said.issuperset(name)]
        return max(named, key=lambda each: _exactness(each[0])) if named else None

    def _asks_only(self, text: str, name: Name) -> bool:
        """Returns whether a text says nothing beside a name but what asks for the thing."""
        for at, word in self._said(text):
            if word in name:
                text = text[:at] + " " * len(word) + text[at + len(word) :]
        return ASKING.issuperset(re.findall(r"[^\W_]+(?:[-_.][^\W_]+)*", text))

    def _said(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields where names are in a text, each with nothing before or behind it that makes it another."""
        for at, first in enumerate(text):
            ends = (at + length for length in self._lengths.get(first, ()))
            word = next((text[at:end] for end in ends if text[at:end] in self._words), "")
            behind = text[at + len(word) :]
            if not word or re.search(r"[\w/-]$", text[:at]) or re.match(r"[\w-]|[./]\w", behind):
                continue
            yield at, word


def _fills(messages: Sequence[dict[str, Any]], context: int) -> bool:
    """Returns whether the texts of messages are far longer than a context can hold."""
    characters = sum(len(str(message.get("content"))) for message in messages)
    return characters > MAX_PER_TOKEN * context


def _exactness(name: Name) -> tuple[int, int]:
    """Returns what orders names: an option says more than its command, a long name more than a short one."""
    return sum(word.startswith("--") for word in name), sum(map(len, name))


def read_rows(folder: Path) -> KnownRows:
    """Returns the table rows (names and answer text) in a folder's `rows.json`.

    Raises:
        BadCheckpoint: there is no such file, or it is damaged.
    """
    return KnownRows(
        KnownRow(tuple(tuple(name) for name in names), text)
        for names, text in read_json(folder / FILE)["rows"]
    )
