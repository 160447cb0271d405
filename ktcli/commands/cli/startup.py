"""Installs a completion script where a shell finds it, with a line in the shell's startup file, and removes both
again. Other lines of that file are left as they are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ktcli import smallfiles
from ktcli.errors import UsageError, refusals
from ktcli.records import dataclass

MARK = "# kt completion"  # ends the line in a startup file
_MOST_BYTES = 4 << 20  # of a startup file
_MADE = b"made by: kt completion"  # in the first lines of every script


@dataclass(frozen=True, slots=True)
class ScriptPlace:
    """The location of a shell's completion script.

    Attributes:
        script: the file of the script.
        startup: the file that the shell starts with; None: it finds scripts by itself.
        line: the line in it.
    """

    shell: str
    script: Path
    startup: Path | None = None
    line: str = ""


def place_of(shell: str) -> ScriptPlace:
    """Returns where the completion script of a shell goes, and the startup file and line that load it (fish needs
    none), by XDG_DATA_HOME, XDG_CONFIG_HOME (fish) and ZDOTDIR (zsh).
    """
    home = Path(os.path.expanduser("~"))
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return ScriptPlace(shell, config / "fish" / "completions" / "kt.fish")
    if shell == "zsh":
        folder = data / "zsh" / "site-functions"
        line = (
            f"fpath+=({_quoted(folder)}); (( $+functions[compdef] )) || {{ autoload -Uz compinit; compinit }};"
            f" autoload -Uz _kt; compdef _kt kt {MARK}"
        )
        return ScriptPlace(
            shell, folder / "_kt", Path(os.environ.get("ZDOTDIR") or home) / ".zshrc", line
        )
    script = data / "bash-completion" / "completions" / "kt"
    line = f"[ -r {_quoted(script)} ] && . {_quoted(script)} {MARK}"
    return ScriptPlace(shell, script, home / ".bashrc", line)


def install(place: ScriptPlace, script: str) -> list[Path]:
    """Installs the completion script and the line that loads it; returns the paths of the files that it changed.

    Raises:
        UsageError: another program's script is there. KtError: a file cannot be read or written.
    """
    done = []
    if _own_script(place) != script.encode():
        _write(place.script, script.encode())
        done.append(place.script)
    if place.startup is not None:
        before = _text(place.startup)
        if _marked(before) != [place.line]:
            others = _without_mark(before)
            end = "" if others.endswith("\n") or not others else "\n"
            _write(place.startup, _encoded(f"{others}{end}{place.line}\n"))
            done.append(place.startup)
    return done


def uninstall(place: ScriptPlace) -> list[Path]:
    """Removes the completion script and the line that loads it; returns the paths of the files that it changed.

    Raises:
        UsageError: another program's script is there. KtError: a file cannot be read or written.
    """
    done = []
    if _own_script(place) is not None:
        with refusals(f"cannot remove {place.script}"):
            place.script.unlink()
        done.append(place.script)
    if place.startup is not None:
        before = _text(place.startup)
        if _marked(before):
            _write(place.startup, _encoded(_without_mark(before)))
            done.append(place.startup)
    return done


def _own_script(place: ScriptPlace) -> bytes | None:
    """The script that is there; None: there is none."""
    data = _read(place.script)
    if data is not None and _MADE not in data[:200]:
        raise UsageError(
            f"{place.script} was not written by kt", hint="move it away and run the command again"
        )
    return data


def _text(path: Path) -> str:
    return (_read(path) or b"").decode("utf-8", "surrogateescape")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _marked(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.endswith(MARK)]


def _without_mark(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.endswith(MARK))


def _read(path: Path) -> bytes | None:
    with refusals(f"cannot read {path}"), contextlib.suppress(FileNotFoundError):
        return smallfiles.read_bounded(path, _MOST_BYTES)
    return None


def _write(path: Path, data: bytes) -> None:
    target = Path(os.path.realpath(path))  # a link, from a repository of such files, stays one
    with refusals(f"cannot write {path}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        smallfiles.write(target, data, mode)


def _quoted(path: Path) -> str:
    """A path between quotes, in which bash and zsh read nothing but the path."""
    return "'" + str(path).replace("'", "'\\''") + "'"
