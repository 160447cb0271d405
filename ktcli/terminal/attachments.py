"""Adds the files that a question names to its text: `@notes.txt` in the question, or `/read notes.txt` before it."""

from __future__ import annotations

import re
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.records import dataclass

MAX_BYTES = 4 << 20  # of a file: about a million tokens
_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|([^\s"]+))')
_AFTER = ".,;:!?)]}'"  # what may follow a name in a sentence
_MOST_AFTER = 16  # of those are tried one after the other


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file that is part of a question.

    Attributes:
        name: the path as the person named it.
    """

    name: str
    text: str

    @property
    def block(self) -> str:
        """The text of the attached file as part of a question: its name, and its content between fences that do not
        occur in it.
        """
        longest = max(map(len, re.findall("`{3,}", self.text)), default=2)
        fence = "`" * (longest + 1)
        return f"{self.name}:\n{fence}\n{self.text.rstrip()}\n{fence}"


def read(name: str) -> Attachment:
    """Returns the text file called `name` as an attachment, with its name and text.

    Raises:
        NotFound: there is no such file. UsageError: it is no plain file of text, empty, or too large.
    """
    try:
        data = smallfiles.read_bounded(Path(name).expanduser(), MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no file {name[:300]}") from None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {name[:300]}: {reason}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name[:300]} is not UTF-8 text (byte {error.start})",
            hint="attach a file of plain text",
        ) from error
    if not text.strip():
        raise UsageError(f"{name[:300]} is empty")
    return Attachment(name, text)


def named_in(question: str) -> tuple[str, list[Attachment]]:
    """Returns the text of a question without the @ before names of files, and the attachments read from those files.

    An @ before a word that names no existing file stays.

    Raises:
        UsageError: an existing file cannot be read as text.
    """
    found: dict[str, Attachment] = {}

    def plain(match: re.Match[str]) -> str:
        quoted, word = match.groups()
        name = quoted or _file_of(word)
        if not name or not _is_there(name):
            return match.group()
        if name not in found:
            found[name] = read(name)
        return name + ("" if quoted else word[len(name) :])

    return _NAMED.sub(plain, question), list(found.values())


def joined(question: str, files: list[Attachment]) -> str:
    """Returns the text of a question with the names and contents of the files below it."""
    return "\n\n".join([question, *(file.block for file in files)])


def _file_of(word: str) -> str:
    """The name in a word, which may end with the signs of a sentence."""
    bare = word.rstrip(_AFTER)
    ends = range(len(word), len(bare) - 1, -1)[:_MOST_AFTER]
    return next((word[:end] for end in ends if _is_there(word[:end])), bare)


def _is_there(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False
