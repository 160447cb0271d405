"""The settings file: one flat table of TOML, which a person may edit. It is read as hostile input.

Nothing in it can stop a command: a key that is no setting and a value that makes no sense are told in one sentence
and left out. A change rewrites one line and leaves every other as it is, comments included; where that cannot be
done, the file stays as it was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import KtError, UsageError
from ktcli.settings import SETTINGS, SHOWN_CHARS, TABLE, Setting

MAX_BYTES = 1 << 16
_MOST_TOLD = 3  # faults in one sentence
_ELSEWHERE = ("KT_CONFIG", "~/kt.toml")  # what a user sets to have the file in another place
_WAIT_S = 5.0  # for another change, which takes milliseconds
# Comments, and names with a whole number, a decimal number, a switch, or a text without escapes: here JSON is TOML.
_PLAIN = (
    r"""[ \t]*(?:([a-z][a-z-]*)[ ]*=[ ]*"""
    r"""(true|false|(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?|"[^"\\\x00-\x1f\x7f]*")[ ]*)?(?:\#[^\x00-\x1f\x7f]*)?"""
)
HEADING = "# Settings of kt. An environment variable comes before what is said here, an option before both."


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """The settings that a settings file has, and what is wrong with it.

    Attributes:
        texts: the text of each setting, checked.
        faults: what is wrong with it, each a part of a sentence.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


NOTHING = SettingsFile()


def path() -> Path:
    """Returns the path of the settings file, which need not exist: KT_CONFIG, else in the folder of the system for
    them."""
    named = os.environ.get("KT_CONFIG", "").strip()
    folder = os.environ.get("XDG_CONFIG_HOME", "").strip() or "~/.config"
    return Path(os.path.expanduser(named or f"{folder}/kt/config.toml")).absolute()


def shown(of: Path) -> str:
    """Returns a path as a person writes it: with ~ for their own folder."""
    home = os.path.expanduser("~")
    return f"~{str(of)[len(home) :]}" if str(of).startswith(f"{home}/") else str(of)


def read(of: Path) -> SettingsFile:
    """Reads a settings file; one that is not there says nothing."""
    try:
        found = os.stat(of)
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError) as error:
        return SettingsFile(faults=(f"it cannot be read ({getattr(error, 'strerror', error)})",))
    return _read(of, (found.st_mtime_ns, found.st_size, found.st_ino))


@lru_cache(maxsize=1)
def _read(of: Path, state: tuple[int, ...]) -> SettingsFile:
    try:
        document = _parse(smallfiles.read_bounded(of, MAX_BYTES))
    except OSError as error:
        return SettingsFile(faults=(f"it cannot be read ({error.strerror})",))
    except (ValueError, RecursionError) as error:
        return SettingsFile(faults=(f"it is no TOML ({_first_line(error)})",))
    texts, faults = {}, []
    for key, value in document.items():
        try:
            texts[key] = _checked(key, value)
        except ValueError as error:
            faults.append(str(error))
    return SettingsFile(texts, tuple(faults))


def _parse(data: bytes) -> dict[str, Any]:
    """The table of a file.

    Raises:
        ValueError, RecursionError: it is no TOML.
    """
    text = data.decode("utf-8")
    plain = _plain(text)
    if plain is not None:
        return plain
    import tomllib  # takes longer than all else that is read at the start

    return tomllib.loads(text)


def _plain(text: str) -> dict[str, Any] | None:
    """The table of a file as `change` writes it; None: only TOML's own reader knows what it means."""
    found: dict[str, Any] = {}
    for line in text.replace("\r\n", "\n").split("\n"):
        parts = re.fullmatch(_PLAIN, line)
        if parts is None or parts[1] in found:
            return None
        if parts[1] is not None:
            found[parts[1]] = json.loads(parts[2])
    return found


def _first_line(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    return (str(error).splitlines() or [""])[0][:200]


def _checked(key: str, value: object) -> str:
    """The text of one value.

    Raises:
        ValueError: it cannot be; the message is a part of a sentence.
    """
    setting = SETTINGS.get(key)
    if setting is None:
        raise ValueError(f"{key[:SHOWN_CHARS]!r} is no setting")
    if not setting.kept:
        raise ValueError(f"{key} is only a variable, {setting.variable}")
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    wrong = f"{key} is {str(value)[:SHOWN_CHARS]!r}, which is {setting.domain.wrong}"
    if not isinstance(value, (str, int, float)):
        raise ValueError(wrong)
    try:
        setting.domain.read(text)
    except ValueError:
        raise ValueError(wrong) from None
    return text


def complaint(of: Path) -> str:
    """Returns the sentence about what is wrong with a settings file; empty if nothing is."""
    faults = read(of).faults
    if not faults:
        return ""
    more = f", and {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
    return f"{shown(of)}: {'; '.join(faults[:_MOST_TOLD])}{more}. The defaults are used instead"


# --- writing ------------------------------------------------------------------------------------------


def change(of: Path, setting: Setting, text: str | None) -> None:
    """Writes a setting into a settings file, or takes it out.

    Args:
        text: the new value, checked; None: the setting goes back to its default.
    Raises:
        UsageError: the file is none that a line can be changed in. KtError: it cannot be written.
    """
    if text is not None and setting.domain.bare:
        text = str(setting.domain.read(text))  # as TOML writes it
    target = Path(os.path.realpath(of))  # a link, from a repository of such files, stays one
    lock = target.parent / f".{target.name}.lock"
    smallfiles.make_folder(lock.parent, *_ELSEWHERE)
    with smallfiles.lock(lock, "changing the settings", wait_s=_WAIT_S):
        before = _text(of)
        lines = _lines_with(
            before.removesuffix("\n").split("\n"), setting.name, _line(setting, text)
        )
        after = "".join(f"{line}\n" for line in lines)
        _verify(of, before, after, setting.name, text)
        write(of, after)


def write(of: Path, text: str) -> None:
    """Writes a settings file as a whole or not at all.

    Raises:
        KtError: the system refuses.
    """
    target = Path(os.path.realpath(of))
    smallfiles.make_folder(target.parent, *_ELSEWHERE)
    try:
        smallfiles.write(target, text)
    except OSError as error:
        raise KtError(
            f"cannot write the settings file {of}: {error.strerror}",
            hint="KT_CONFIG names another file",
        ) from error


def template() -> str:
    """Returns the text of a settings file that says nothing yet: every setting as a comment."""
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
        return smallfiles.read_bounded(of, MAX_BYTES).decode("utf-8")
    except FileNotFoundError:
        return f"{HEADING}\n\n"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"the settings file {of} cannot be read: {reason}") from error


def _line(setting: Setting, text: str | None) -> str:
    """The line of a value in the file; empty: there is none."""
    if text is None:
        return ""
    if setting.domain.bare:
        return f"{setting.name} = {text}"
    # JSON's escapes are TOML's, but for DEL, which TOML does not let stand.
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{setting.name} = {quoted}"


def _lines_with(lines: list[str], name: str, line: str) -> list[str]:
    """`lines` with that of one key replaced, or added before the first table; an empty one removed."""
    begins = re.compile(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=")
    tables = [at for at, each in enumerate(lines) if each.lstrip().startswith("[")]
    end = tables[0] if tables else len(lines)
    found = [at for at in range(end) if begins.match(lines[at])]
    at = found[0] if found else end
    return [*lines[:at], *([line] if line else []), *lines[at + len(found[:1]) :]]


def _verify(of: Path, before: str, after: str, name: str, text: str | None) -> None:
    """Checks that the new file says what it should, and all else as it did.

    Raises:
        UsageError: it does not, or the old one is no TOML: a person has to change it.
    """
    hint = "kt config edit opens it"
    try:
        old = _parse(before.encode())
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the settings file {of} is no TOML: {_first_line(error)}", hint=hint
        ) from error
    try:
        new = _parse(after.encode())
        same = {k: v for k, v in new.items() if k != name} == {
            k: v for k, v in old.items() if k != name
        }
        done = (name not in new) if text is None else _checked(name, new.get(name)) == text
    except (ValueError, RecursionError):
        same = done = False
    if not (same and done):
        raise UsageError(f"{name} cannot be changed in one line of {of}", hint=hint)
