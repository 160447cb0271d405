"""Returns the current value of a setting and its source: the environment, the settings file, or the default.

`settings` has the table of them, `settingsfile` reads the file. Everything is read when it is asked for, so that a
test or a user can change it. A variable that makes no sense is an error that names it, never a silent default; the
file may be another version's, and is only warned of, but for the settings that decide where bytes go.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from shlex import quote
from typing import Any

from ktcli import homes, settingsfile
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.settings import SETTINGS, Setting

SYSTEM_LIBRARY = "/usr/local/share/kt"  # where an administrator puts models for everybody


class Origin(Enum):
    """The sources of a setting's value."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Stated:
    """The value of a setting as the environment or the file has it, before any option.

    Attributes:
        text: as somebody wrote it; empty: nobody did.
        fault: what is wrong with the line of the file that it has; its text is not known then.
    """

    setting: Setting
    origin: Origin
    text: str = ""
    fault: str = ""

    @property
    def source(self) -> str:
        """The source of the value of a setting, as the subject of a sentence: "KT_THREADS", or "threads in
        ~/.config/kt/config.toml".
        """
        if self.origin is Origin.FILE:
            return f"{self.setting.name} in {settingsfile.shown(settingsfile.path())}"
        return self.setting.variable

    @property
    def words(self) -> str:
        """The assignment of a setting as it was written: "KT_THREADS=8", or "threads = 8 in
        ~/.config/kt/config.toml".
        """
        if self.origin is Origin.FILE:
            return f"{self.setting.name} = {self.text} in {settingsfile.shown(settingsfile.path())}"
        return f"{self.setting.variable}={self.text}"

    @property
    def undo(self) -> str:
        """The command that removes the setting where it was made: "unset KT_THREADS" or "kt config unset threads"."""
        if self.origin is Origin.FILE:
            return f"kt config unset {self.setting.name}"
        return f"unset {self.setting.variable}"

    @property
    def value(self) -> Any:
        """The value of the setting, parsed from its text; None: it is not set.

        Raises:
            UsageError: the text is no value of this setting, or its line in the file cannot be read.
        """
        self.require()
        return self.setting.read(self.text, self.source, self.undo) if self.text else None

    def require(self) -> None:
        """Raises an error if the line of the settings file for this setting cannot be read.

        Raises:
            UsageError: it cannot be read, so the default might not be what the user meant.
        """
        if self.fault:
            raise UsageError(
                self.fault,
                hint=f"kt config edit opens the file; {self.setting.variable} overrides it",
            )


def stated(name: str) -> Stated:
    """Returns the text and source of the setting called `name`: from the environment, else from the settings file, else
    unset.
    """
    setting = SETTINGS[name]
    said = os.environ.get(setting.variable, "")
    if said.strip():
        return Stated(setting, Origin.ENVIRONMENT, said if name == "home" else said.strip())
    # Where there is a variable, the file need not be read.
    if not setting.kept:
        return Stated(setting, Origin.DEFAULT)
    file = settingsfile.read(settingsfile.path())
    kept, fault = file.texts.get(name, ""), file.stops.get(name, "")
    return Stated(setting, Origin.FILE if kept or fault else Origin.DEFAULT, kept, fault)


def value(name: str) -> Any:
    """Returns the value of the setting called `name`, from the environment or the settings file; None: it is not set.

    Raises:
        UsageError: the text is not a value of this setting, or its line in the file cannot be read.
    """
    return stated(name).value


def environment() -> dict[str, str]:
    """Returns the environment variables, values by name, with which another process has the same library and settings,
    wherever it is started.
    """
    said = {each.variable: os.environ.get(each.variable, "") for each in SETTINGS.values()}
    named = any(os.environ.get(name, "").strip() for name in ("KT_CONFIG", "XDG_CONFIG_HOME"))
    file = {"KT_CONFIG": str(settingsfile.path())} if named else {}
    return {
        **{name: text for name, text in said.items() if text.strip()},
        **file,
        "KT_HOME": str(home()),
    }


def home() -> Path:
    """Returns the absolute path of the folder of the library of models; it need not exist yet.

    Raises:
        UsageError: the path is not a folder; a library that was there before, or the parent of a folder that the
            setting names, is missing, as when a disk is not mounted; or the setting cannot be read.
    """
    said = stated("home")
    said.require()
    if said.text:
        given, source = said.text, said.source
    else:
        given = (os.environ.get("XDG_DATA_HOME") or "~/.local/share") + "/kt"
        source = "the library folder"
    try:
        path = Path(given).expanduser().absolute()
    except RuntimeError:  # ~somebody
        raise UsageError(f"{source} is {given}, but there is no such home folder") from None
    try:
        wrong = "which is a file, not a folder" if path.exists() and not path.is_dir() else ""
        if not path.exists() and path.is_symlink():
            wrong = "a broken link"
        lost = bool(said.text) and not path.parent.exists()
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {path}: {error.strerror}") from error
    if wrong:
        raise UsageError(
            f"{source} is {path}, {wrong}",
            hint="set KT_HOME to a folder on a disk with room, for example: export KT_HOME=~/kt",
        )
    if homes.is_missed(path, named=bool(said.text)):
        raise UsageError(
            f"the library at {path} does not exist; is its disk mounted?",
            hint=f"mount it, or create a new library there: mkdir -p {quote(f'{path}/packs')}",
        )
    if lost:
        raise UsageError(
            f"{source} is {path}, but there is no folder {path.parent}",
            hint=f"mount its disk, or create the folder: mkdir -p {quote(str(path))}",
        )
    return path


def libraries() -> tuple[Path, ...]:
    """Returns the absolute paths of the further library folders: those of the setting libraries, which need not exist,
    else SYSTEM_LIBRARY (/usr/local/share/kt) if it exists; without the user's own library.

    Raises:
        UsageError: the setting is invalid, or `home` raises it.
    """
    said = stated("libraries")
    said.require()
    named: list[str] = said.value if said.text else [SYSTEM_LIBRARY]
    found = dict.fromkeys(Path(os.path.expanduser(each)).absolute() for each in named)
    own = home()
    return tuple(each for each in found if each != own and (said.text or os.path.isdir(each)))


def forced_isa() -> str | None:
    """Returns the name of the instruction set that KT_ISA forces for the kernels, None if unset; the native library
    checks it.
    """
    return stated("isa").text or None


def forced_tile_min() -> int | None:
    """Returns the number of tokens per expert in KT_TILE_MIN, from which AMX tiles are used; None if unset.

    Raises:
        UsageError: not a whole number from 1 to 4096.
    """
    found: int | None = value("tile-min")
    return found


def cache_bytes() -> int | None:
    """Returns the maximum number of bytes that KV pages on disk may take; 0: none are stored; None: it is not set.

    Raises:
        UsageError: the setting is not a valid size.
    """
    found: int | None = value("cache")
    return found


def records_heat() -> bool:
    """Returns whether chats record which experts they use, which KT_HEAT=off turns off.

    Raises:
        UsageError: KT_HEAT is neither on nor off.
    """
    return value("heat") is not False
