"""The options `--api-key` and `--api-key-file`: the keys, one of which a client must send."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated

import typer

from ktcli import smallfiles
from ktcli.commands.cli.declarations import exclusive, option, preferred, setting_option
from ktcli.errors import UsageError
from ktcli.server.http.access import is_loopback
from ktcli.server.http.keys import DEFAULT, FILE_BYTES_MOST, NamedKey, keys_in

KeyOpt = Annotated[
    str | None,
    option(
        "--api-key KEY",
        "API key that clients must send. Other users can see it in the process list.",
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
    """Returns the API key of --api-key, or the first one in the file of --api-key-file; empty: neither is given.
    Raises: as `given_keys`.
    """
    return next((each.key for each in given_keys(key, file)), "")


def given_keys(key: str | None, file: Path | None) -> list[NamedKey]:
    """Returns the API keys of --api-key or of the file of --api-key-file, each with its name; empty: neither is given.

    Raises:
        UsageError: a key is malformed, both options are given, or the file cannot be read or can be read by others.
    """
    if key is not None and file is not None:
        raise exclusive("--api-key", "--api-key-file")
    if file is not None:
        return keys_of_file(file)
    return [] if key is None else [NamedKey(DEFAULT, _checked_key(key))]


def require_key(host: str, *, has_key: bool, who: str = "--host") -> None:
    """Raises an error if other machines can reach a server at the address `host` and it has no API key.

    Args:
        who: the option or setting that gives the address, for the error's sentence.
    Raises:
        UsageError: they can.
    """
    if not has_key and not is_loopback(host.lower()):
        raise UsageError(
            f"{who} {host[:100]} is reachable from other machines and needs an API key",
            hint="put one into a file that only you can read, and pass it with --api-key-file",
        )


def _checked_key(key: str) -> str:
    """Returns a key that can stand in a header. Raises: UsageError: it cannot."""
    if not key.strip().isascii() or not key.strip().isprintable() or not key.strip():
        raise UsageError(
            "--api-key is not a valid key",
            hint="a key is one line of ASCII letters, digits and punctuation",
        )
    return key.strip()


def keys_of_file(file: Path, option: str = "--api-key-file") -> list[NamedKey]:
    """Returns the API keys in a file, each with its name.

    Args:
        option: the option that names the file, for the error's sentence.
    Raises:
        UsageError: it cannot be read, has no or malformed keys, or others may read it, too.
    """
    try:
        status = file.stat()
        text = smallfiles.read_bounded(file, FILE_BYTES_MOST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"{option} {str(file)[:300]}: {said}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"other users can read the keys in {str(file)[:300]}",
            hint=f"chmod 600 {str(file)[:300]}",
        )
    return keys_in(text, f"{option} {str(file)[:300]}")
