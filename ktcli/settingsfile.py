"""The settings file: one flat TOML table, which users may edit. It is read as hostile input, line by line.

A line that cannot be read, a key that is no setting and a value that makes no sense are told with their line and left
out; all other lines hold. Only a setting that decides where bytes go is never replaced by its default: what is wrong
with it stops the command that asks for it. A change rewrites the lines of one setting and leaves every other as it
is, comments and broken lines included; where that cannot be done, the file stays as it was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import UsageError, refusals
from ktcli.records import dataclass
from ktcli.settings import SETTINGS, SHOWN_CHARS, TABLE, Setting

MAX_BYTES = 1 << 16
WHERE_BYTES_GO = ("home", "libraries", "cache")
_MOST_TOLD = 3  # faults in one sentence
_ELSEWHERE = ("KT_CONFIG", "~/kt.toml")  # what a user sets to have the file in another place
_WAIT_S = 5.0  # for another change, which takes milliseconds
# Comments, and names with a whole number, a decimal number, a switch, or a text without escapes: here JSON is TOML.
_PLAIN = (
    r"""[ \t]*(?:([a-z][a-z-]*)[ ]*=[ ]*"""
    r"""(true|false|(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?|"[^"\\\x00-\x1f\x7f]*")[ ]*)?(?:\#[^\x00-\x1f\x7f]*)?"""
)
_CLOSES = ("]", '"""', "'''")  # what ends a value of several lines
_MOST_LINES = 1000  # of such a value
# Characters that are parsed to find the ends of such values: a fraction of a second.
_MOST_TRIED = 16 * MAX_BYTES
# How a line begins that a person meant for a setting, TOML or not: "KT_HOME=/models", "export kt_home: x", '"home"'.
_MEANT = r"\W*(?:export\s+)?(?:kt[_-])?([a-z][a-z_-]*)"
_ALSO = {"library": "home"}  # what people call settings
_BOM = "\ufeff"
HEADING = "# Settings of kt. An environment variable overrides this file; a command-line option overrides both."


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The settings in a settings file, and its errors.

    Attributes:
        texts: the text of each setting, checked.
        faults: what is wrong with it, each a part of a sentence.
        stops: what is wrong with the settings that have no safe default: a sentence for each.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    stops: Mapping[str, str] = field(default_factory=dict)


NOTHING = SettingsFile()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one line of the file says, or several that are one value.

    Attributes:
        at: the index of its first line.
        end: the index after its last.
        name: the key; of a line that cannot be read, the setting that it seems to be meant for.
        fault: why it cannot be read; empty: it can.
    """

    at: int
    end: int
    name: str = ""
    value: object = None
    fault: str = ""
    is_table: bool = False


def path() -> Path:
    """Returns the absolute path of the settings file, which need not exist: that of KT_CONFIG, else kt/config.toml in
    $XDG_CONFIG_HOME or ~/.config.
    """
    named = os.environ.get("KT_CONFIG", "").strip()
    folder = os.environ.get("XDG_CONFIG_HOME", "").strip() or "~/.config"
    return Path(os.path.expanduser(named or f"{folder}/kt/config.toml")).absolute()


def shown(of: Path) -> str:
    """Returns a path as text, with ~ for the user's home folder."""
    home = os.path.expanduser("~")
    return f"~{str(of)[len(home) :]}" if str(of).startswith(f"{home}/") else str(of)


def read(of: Path) -> SettingsFile:
    """Returns the settings in a file, and the errors in it; neither if it does not exist, or is /dev/null."""
    try:
        found = os.stat(of)
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError) as error:
        return _unreadable(of, getattr(error, "strerror", None) or str(error))
    if str(of) == os.devnull:
        return NOTHING
    return _read(of, (found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=1)
def _read(of: Path, state: tuple[int, ...]) -> SettingsFile:
    try:
        data = smallfiles.read_bounded(of, MAX_BYTES)
    except OSError as error:
        return _unreadable(of, str(error.strerror))
    return _meaning(_decoded(data), shown(of))


def _unreadable(of: Path, why: str) -> SettingsFile:
    sentence = f"the settings file {shown(of)} cannot be read ({why}); it may set {{}}"
    stops = {name: sentence.format(name) for name in WHERE_BYTES_GO}
    return SettingsFile(faults=(f"it cannot be read ({why})",), stops=stops)


def _decoded(data: bytes) -> str:
    """The text of a file; bytes that are not UTF-8 stay in it, for a change to write again."""
    return data.decode("utf-8", "surrogateescape")


def _meaning(text: str, where: str) -> SettingsFile:
    """What the text of a file says.

    Args:
        where: its path, for sentences.
    """
    texts: dict[str, str] = {}
    faults: list[str] = []
    stops: dict[str, str] = {}
    lines: dict[str, int] = {}  # where each setting was set first
    for entry in _entries(_lines(text)):
        try:
            said = _said(entry, lines)
        except ValueError as error:
            faults.append(f"line {entry.at + 1}: {error}")
            if (meant := _meant(entry.name)) in WHERE_BYTES_GO:
                stops.setdefault(meant, f"{where}, line {entry.at + 1}: {error}")
        else:
            texts[entry.name], lines[entry.name] = said, entry.at
    return SettingsFile(texts, tuple(faults), stops)


def _said(entry: _Entry, lines: Mapping[str, int]) -> str:
    """The text of the value of an entry.

    Raises:
        ValueError: there is none; the message is a part of a sentence.
    """
    if entry.fault:
        raise ValueError(entry.fault)
    if entry.is_table:
        raise ValueError(f"settings have no tables, so [{entry.name[:SHOWN_CHARS]}] has no effect")
    if entry.name in lines:
        raise ValueError(f"{entry.name} is set twice; line {lines[entry.name] + 1} applies")
    return _checked(entry.name, entry.value)


def _meant(name: str) -> str:
    """The setting that a key is meant for: `home` of KT_HOME and of library."""
    plain = name.strip().lower().removeprefix("kt_").removeprefix("kt-").replace("_", "-")
    return _ALSO.get(plain, plain)


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _entries(lines: list[str]) -> Iterator[_Entry]:
    """Yields what the lines of a file say, each on its own: what one of them breaks is that one."""
    at, left = 0, _MOST_TRIED
    while at < len(lines):
        entry, tried = _entry(lines, at, left)
        left -= tried
        if entry.name or entry.fault:
            yield entry
        at = entry.end


def _entry(lines: list[str], at: int, most: int) -> tuple[_Entry, int]:
    """The entry that begins at a line, and how many characters were parsed to find its end.

    Args:
        most: the characters that may be.
    """
    line = _bare(lines, at)
    if line.lstrip(" \t").startswith("#"):  # in whatever encoding
        return _Entry(at, at + 1), 0
    plain = re.fullmatch(_PLAIN, line)
    if plain is not None and _is_text(line):
        value = json.loads(plain[2]) if plain[1] else None
        return _Entry(at, at + 1, plain[1] or "", value), 0
    whole, fault, tried = line, "", 0
    for end in range(at + 1, min(len(lines), at + _MOST_LINES) + 1):
        if end > at + 1:
            whole = f"{whole}\n{_bare(lines, end - 1)}"
            closes = any(each in lines[end - 1] for each in _CLOSES)
            tried += len(whole) if closes else len(lines[end - 1]) + 1
            if tried > most:
                break
            if not closes:
                continue
        try:
            name, value = _parsed(whole)
        except (ValueError, RecursionError) as error:
            fault = fault or _first_line(error)
            if not _goes_on(line):
                break
        else:
            return _Entry(at, end, name, value, is_table=_is_table(line)), tried
    meant = re.match(_MEANT, line.replace("\0", ""), re.IGNORECASE)
    return _Entry(
        at, at + 1, meant[1] if meant else "", fault=f"it cannot be read ({fault})"
    ), tried


def _bare(lines: list[str], at: int) -> str:
    """A line without what Windows puts around it."""
    line = lines[at].removesuffix("\r")
    return line.removeprefix(_BOM) if at == 0 else line


def _goes_on(line: str) -> bool:
    """Returns whether a line that cannot be read alone may begin a value of several lines."""
    value = line.partition("=")[2].lstrip()
    return value.startswith(("[", '"""', "'''"))


def _is_text(text: str) -> bool:
    """Returns whether there are no bytes in it that are not UTF-8."""
    return text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text)


def _is_table(line: str) -> bool:
    return line.lstrip(" \t").startswith("[")


def _parsed(text: str) -> tuple[str, Any]:
    """The key and the value of one entry in TOML; an empty key: it says nothing.

    Raises:
        ValueError, RecursionError: it cannot be read.
    """
    if not _is_text(text):
        raise ValueError("it is not UTF-8")
    import tomllib  # takes longer than all else that is read at the start

    for name, value in tomllib.loads(text).items():
        return name, value
    return "", None


def _first_line(error: BaseException) -> str:
    """The message of TOML's reader as a part of a sentence, without the position in the line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = (str(error).splitlines() or [""])[0].partition(" (at ")[0].partition(";")[0][:200]
    return f"{said[:1].lower()}{said[1:]}"


def _checked(key: str, value: object) -> str:
    """The text of one value.

    Raises:
        ValueError: it cannot be; the message is a part of a sentence.
    """
    setting = SETTINGS.get(key)
    if setting is None:
        raise ValueError(f"{key[:SHOWN_CHARS]!r} is not a setting")
    if not setting.kept:
        raise ValueError(f"{key} can only be set as a variable, {setting.variable}")
    try:
        text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    except ValueError:  # of thousands of digits
        raise ValueError(f"{key} is a number with too many digits") from None
    wrong = f"{key} is {text[:SHOWN_CHARS]!r}, which is {setting.domain.wrong}"
    if not isinstance(value, (str, int, float)):
        raise ValueError(wrong)
    try:
        setting.domain.read(text)
    except ValueError:
        raise ValueError(wrong) from None
    return text


def complaint(of: Path) -> str:
    """Returns a sentence with the first three errors in the settings file at a path; empty if there are none."""
    faults = read(of).faults
    if not faults:
        return ""
    more = f", and {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
    return f"{shown(of)}: {'; '.join(faults[:_MOST_TOLD])}{more}. All other lines apply"


# --- writing ------------------------------------------------------------------------------------------


def change(of: Path, setting: Setting, text: str | None) -> None:
    """Sets or removes one setting in a settings file.

    Args:
        text: the new value, checked; None: the setting goes back to its default.
    Raises:
        UsageError: a line of this file cannot be changed safely. KtError: it cannot be written.
    """
    if text is not None and setting.domain.bare:
        text = str(setting.domain.read(text))  # as TOML writes it
    target = Path(os.path.realpath(of))  # a link, from a repository of such files, stays one
    lock = target.parent / f".{target.name}.lock"
    smallfiles.make_folder(lock.parent, *_ELSEWHERE)
    with smallfiles.lock(lock, "changing the settings", wait_s=_WAIT_S):
        before = _text(of)
        after = _changed(before, setting.name, _line(setting, text))
        _verify(of, before, after, setting.name, text)
        write(of, after)


def write(of: Path, text: str) -> None:
    """Writes a text into a settings file, atomically.

    Raises:
        KtError: the file cannot be written.
    """
    target = Path(os.path.realpath(of))
    smallfiles.make_folder(target.parent, *_ELSEWHERE)
    with refusals(f"cannot write the settings file {of}", hint="KT_CONFIG names another file"):
        smallfiles.write(target, text.encode("utf-8", "surrogateescape"))


def template() -> str:
    """Returns the text of a new settings file, in which every setting that it may have is in a comment."""
    parts = [HEADING]
    for setting in TABLE:
        if setting.kept:
            example = _line(setting, "…").replace('"…"', "…")
            parts.append(
                f"# {setting.help}\n# It can be {setting.domain.allowed}. Default: {setting.default}.\n# {example}"
            )
    return "\n\n".join(parts) + "\n"


def _text(of: Path) -> str:
    try:
        return _decoded(smallfiles.read_bounded(of, MAX_BYTES))
    except FileNotFoundError:
        return f"{HEADING}\n\n"
    except OSError as error:
        raise UsageError(
            f"the settings file {of} cannot be read: {error.strerror}",
            hint="KT_CONFIG names another file",
        ) from error


def _line(setting: Setting, text: str | None) -> str:
    """The line of a value in the file; empty: there is none."""
    if text is None:
        return ""
    if setting.domain.bare:
        return f"{setting.name} = {text}"
    # JSON's escapes are TOML's, but for DEL, which TOML does not let stand.
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{setting.name} = {quoted}"


def _changed(text: str, name: str, line: str) -> str:
    """The text of a file with the entry of one setting replaced, or added before the first table.

    What cannot be read and was meant for it becomes a comment, as does what sets it once more.

    Args:
        line: the new one; empty: the setting is taken out.
    """
    lines = _lines(text)
    end = "\r" if lines and lines[0].endswith("\r") else ""
    entries = list(_entries(lines))
    own = [each for each in entries if _is_about(each, name)]
    sound = [each for each in own if not each.fault and each.name == name and not each.is_table]
    new_at = min((each.at for each in own), default=None)
    if new_at is None:
        new_at = min((each.at for each in entries if each.is_table), default=len(lines))
    gone = range(sound[0].at, sound[0].end) if sound else range(0)
    comments = {at for each in own for at in range(each.at, each.end)} - set(gone)
    made = list[str]()
    for at in range(len(lines) + 1):
        if at == new_at and line:
            made.append(f"{line}{end}")
        if at < len(lines) and at not in gone:
            made.append(f"# {lines[at].removeprefix(_BOM)}" if at in comments else lines[at])
    if text.startswith(_BOM) and made and not made[0].startswith(_BOM):
        made[0] = f"{_BOM}{made[0]}"
    return "".join(f"{each}\n" for each in made)


def _is_about(entry: _Entry, name: str) -> bool:
    """Returns whether an entry sets a setting, or would if it could be read."""
    return (
        entry.name if not entry.fault and entry.name in SETTINGS else _meant(entry.name)
    ) == name


def _verify(of: Path, before: str, after: str, name: str, text: str | None) -> None:
    """Checks that the new file says what it should, and all else as it did.

    Raises:
        UsageError: it does not: a person has to change it.
    """
    old, new = dict(_meaning(before, "").texts), dict(_meaning(after, "").texts)
    old.pop(name, None)
    if new.pop(name, None) != text or new != old:
        raise UsageError(
            f"kt cannot change {name} in {of} without changing other settings",
            hint="kt config edit opens it",
        )
