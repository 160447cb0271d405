"""Reads the rows of data files, one at a time: JSON (a list, or an object per line), and CSV.

Nothing here knows what a row means. A row is bounded, a file is not.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ktcli.errors import counted
from ktcli.records import dataclass
from ktcli.samples.blocks import MAX_ROW_CHARS, blocks, lines, too_long
from ktcli.samples.sample import BadData
from ktcli.smallfiles import MAX_NESTING, nests_beyond

Told = Callable[[int], None]  # is told the bytes read so far

_SPACE = re.compile(r"[ \t\r\n]*")
# Characters before the end of what was read in which a word or an escape that is cut shows itself.
_NEAR_END = 16
_PANDAS = "python -c \"import pandas; pandas.{read}('{name}').to_json('{stem}.jsonl', orient='records', lines=True)\""
_UNPACK = "{tool} {name}"
_COLUMN = 'write each text as a row of a .jsonl file: {{"text": "…"}}'
# Suffixes of files that hold rows in another way, and what to do about each.
_OTHERS = {
    ".parquet": ("read_parquet", _PANDAS),
    ".arrow": ("read_feather", _PANDAS),
    ".feather": ("read_feather", _PANDAS),
    ".xlsx": ("read_excel", _PANDAS),
    ".xls": ("read_excel", _PANDAS),
    ".tsv": ("read_table", _PANDAS),
    ".txt": ("", _COLUMN),
    ".md": ("", _COLUMN),
    ".gz": ("gunzip", _UNPACK),
    ".zst": ("unzstd", _UNPACK),
    ".xz": ("unxz", _UNPACK),
    ".zip": ("unzip", _UNPACK),
}


@dataclass(frozen=True, slots=True)
class DataRow:
    """A row of a file.

    Attributes:
        where: the place of it, for people: "mine.jsonl, line 7".
    """

    values: dict[str, Any]
    where: str


def rows(path: Path, told: Told | None = None) -> Iterator[DataRow]:
    """Yields the rows of a data file, read as JSON, JSON lines or CSV by the ending of its name.

    Raises:
        NotFound, BadData: the file cannot be read, or has something in it that is not a row.
    """
    return _READERS[_suffix(path)](path, told)


def check_kind(path: Path) -> None:
    """Raises BadData if kt does not read data files with the ending of this path; the error's hint says what to do."""
    suffix = _suffix(path)
    if suffix in _READERS:
        return
    tool, advice = _OTHERS.get(suffix, ("", "kt reads .json, .jsonl and .csv"))
    unnamed = "folders" if path.is_dir() else "files without an extension"
    kind = f"{suffix[1:]} files" if suffix else unnamed
    raise BadData(
        f"cannot read {path}: kt does not read {kind}",
        hint=advice.format(read=tool, tool=tool, name=path.name, stem=path.stem),
    )


def _suffix(path: Path) -> str:
    return path.suffix.lower()


# --- JSON -------------------------------------------------------------------------------------------


def _json_rows(path: Path, told: Told | None) -> Iterator[DataRow]:
    """Yields the objects of a list, or of one line after the other."""
    text = _JsonText(path, told)
    if not text.peek():
        raise BadData(f"{path.name} has no rows")
    in_list = text.take("[")
    if in_list and text.take("]"):
        raise BadData(f"{path.name} is an empty list")
    while text.peek():
        line = text.line
        yield DataRow(text.object(), f"{path.name}, line {line}")
        if in_list and not text.take(","):
            if not text.take("]"):
                raise text.wrong("a comma or the end of the list is missing")
            if text.peek():
                raise text.wrong("something follows the end of the list")
            return
    if in_list:
        raise text.wrong("the file ends in the middle of the list")


class _JsonText:
    """The text of a JSON file from a place on, of which as much is in memory as the next value takes.

    Attributes:
        line: the line of the place.
    """

    def __init__(self, path: Path, told: Told | None) -> None:
        self._name, self._blocks = path.name, blocks(path, told)
        self._decoder = json.JSONDecoder()
        self._text, self._at, self.line = "", 0, 1

    def peek(self) -> str:
        """Goes to the next character that is no space, and returns it; empty: there is none."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._go(found.end() if found else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, letter: str) -> bool:
        """Goes behind a letter, if it is the next one; returns whether it was."""
        if self.peek() != letter:
            return False
        self._go(self._at + 1)
        return True

    def object(self) -> dict[str, Any]:
        """Returns the object that begins here, and goes behind it."""
        if self.peek() != "{":
            raise self.wrong("a row must be an object: {…}")
        value, end = self._decoded()
        if end - self._at > MAX_ROW_CHARS:
            raise too_long(self._name, self.line)
        if nests_beyond(value, MAX_NESTING):
            raise self.wrong(f"a row is nested more than {MAX_NESTING} levels deep")
        self._go(end)
        return value

    def _decoded(self) -> tuple[dict[str, Any], int]:
        while True:
            try:
                return self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                said, ahead = error.msg, error.pos - self._at
            except RecursionError:
                raise self.wrong("a row is nested too deeply") from None
            except ValueError:
                raise self.wrong("a number has too many digits") from None
            left = len(self._text) - self._at - ahead
            is_cut = said.startswith("Unterminated") or left <= _NEAR_END
            if is_cut and len(self._text) - self._at > MAX_ROW_CHARS:
                raise too_long(self._name, self.line)
            if not is_cut or not self._more():
                self._go(self._at + ahead)
                raise self.wrong(f"not JSON: {said.partition(';')[0].removesuffix(' at').lower()}")

    def wrong(self, what: str) -> BadData:
        """Returns the error that there is something wrong here."""
        return BadData(f"{self._name}, line {self.line}: {what}")

    def _go(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _more(self) -> bool:
        """Reads on, at least as much as there is of the value that begins here; returns whether there was any."""
        self._text, self._at = self._text[self._at :], 0
        parts, chars = [self._text], 0
        while chars <= len(self._text) and (block := next(self._blocks, "")):
            parts.append(block)
            chars += len(block)
        self._text = "".join(parts)
        return chars > 0


# --- CSV --------------------------------------------------------------------------------------------


def _csv_rows(path: Path, told: Told | None) -> Iterator[DataRow]:
    """Yields the rows below the header."""
    text = _CsvLines(path, told)
    csv.field_size_limit(2 * MAX_ROW_CHARS)  # of the whole process; the bound is that of `text`
    reader = csv.reader(text, strict=True)
    names: list[str] = []
    while True:
        line = reader.line_num + 1
        text.begin(line)
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise BadData(f"{path.name}, line {line}: not CSV: {error}") from None
        if cells is None:
            break
        if not cells:
            continue
        if not names:
            names = _header(cells, f"{path.name}, line {line}")
            continue
        if len(cells) != len(names):
            values = counted(len(cells), "value")
            raise BadData(
                f"{path.name}, line {line}: {values}, but the first line names {len(names)} columns",
                hint='put a value with commas or line breaks in quotes: "…"',
            )
        yield DataRow(dict(zip(names, cells, strict=True)), f"{path.name}, line {line}")


def _header(cells: list[str], where: str) -> list[str]:
    names = [each.strip() for each in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadData(f"{where}: the column {twice[:60]!r} occurs twice")
    return names


class _CsvLines:
    """The lines of a CSV file, of which one row may have so many characters and no more."""

    def __init__(self, path: Path, told: Told | None) -> None:
        self._name, self._lines = path.name, lines(path, told)
        self._chars, self._line = 0, 1

    def begin(self, line: int) -> None:
        """Says that another row begins in this line."""
        self._chars, self._line = 0, line

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = next(self._lines)
        self._chars += len(text)
        if self._chars > MAX_ROW_CHARS:
            raise too_long(self._name, self._line)
        if "\0" in text:
            raise BadData(
                f"{self._name}, line {self._line}: it contains a zero byte, so it is not text"
            )
        return text


_READERS: dict[str, Callable[[Path, Told | None], Iterator[DataRow]]] = {
    ".json": _json_rows,
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".csv": _csv_rows,
}
