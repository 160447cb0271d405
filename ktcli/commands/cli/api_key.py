"""The options `--api-key` and `--api-key-file`: the key that a server wants to be shown."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated

import typer

from ktcli import smallfiles
from ktcli.commands.cli.options import preferred, setting_option
from ktcli.errors import UsageError

KEY_CHARS = 4096  # the most of a key

KeyOpt = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="API key that clients must send. Other users can see it in the process list.",
    ),
]


def _key_file(
    context: typer.Context, option: typer.CallbackParam, value: Path | None
) -> Path | None:
    """The file of the option, else of the setting, unless there is a key on the command line."""
    if context.params.get("api_key") is not None:
        return value
    found = preferred(context, option, value)
    return None if found is None else Path(found).expanduser()


KeyFileOpt = Annotated[Path | None, setting_option("api-key-file", callback=_key_file)]


def given_key(key: str | None, file: Path | None) -> str:
    """Returns the key that the options give; empty: none.

    Raises:
        UsageError: it is none, both are given, or others can read the file.
    """
    if key is not None and file is not None:
        raise UsageError(
            "--api-key and --api-key-file cannot be used together", hint="leave out one of them"
        )
    return _checked_key(key, "--api-key") if file is None else _key_of(file)


def _checked_key(key: str | None, where: str) -> str:
    """A key that can stand in a header; empty: none was given."""
    if key is None:
        return ""
    if not key.strip().isascii() or not key.strip().isprintable() or not key.strip():
        raise UsageError(
            f"{where} is not a valid key",
            hint="a key is one line of ASCII letters, digits and punctuation",
        )
    return key.strip()


def _key_of(file: Path) -> str:
    """The key in a file.

    Raises:
        UsageError: it cannot be read, holds no key, or others may read it, too.
    """
    try:
        status = file.stat()
        text = smallfiles.read_bounded(file, KEY_CHARS).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"--api-key-file {str(file)[:300]}: {said}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"other users can read the key in {str(file)[:300]}",
            hint=f"chmod 600 {str(file)[:300]}",
        )
    return _checked_key(text, f"the content of --api-key-file {str(file)[:300]}")
