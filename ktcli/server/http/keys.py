"""The API keys of a server, each with a name; a file can have several, and be read again while the server runs.

A line of a file is `name:key` or `name key`; a key without a name must be the only one. Names, never keys, are what
logs, counters and kept responses go by. Keys are looked up by their hashes, so the time that it takes says nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import field

from ktcli.errors import UsageError
from ktcli.records import dataclass

DEFAULT = "default"  # the name of a key without one
FILE_BYTES_MOST = 1 << 18
KEYS_MOST = 1_000
KEY_CHARS_MOST = 4096
_KEY = re.compile(r"[!-~]+")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:\s*:\s*|\s+)([!-~]+)", re.ASCII)
_HINT = "a line is name:key or name key; a name has at most 64 letters, digits, '.', '_' and '-'; a key has no spaces"


@dataclass(frozen=True, slots=True)
class NamedKey:
    """An API key and its name."""

    name: str
    key: str = field(repr=False)


class ApiKeys:
    """The API keys that a server accepts; none: it requires no key."""

    def __init__(self, keys: Sequence[NamedKey] = ()) -> None:
        self._names: dict[bytes, str] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[NamedKey]) -> None:
        """Replaces all keys that the server accepts with `keys`."""
        self._names = {_hash(each.key): each.name for each in keys}

    def __bool__(self) -> bool:
        return bool(self._names)

    def name_of(self, said: str) -> str | None:
        """Returns the name of the API key that a client sent; None: the server does not accept it."""
        return self._names.get(_hash(said))


def keys_in(text: str, where: str) -> list[NamedKey]:
    """Returns the keys in the text of a file; empty lines and those that begin with # are ignored.

    Args:
        where: the source of the text, for errors.
    Raises:
        UsageError: a line is malformed, a key is there twice, one of several has no name, or there are no keys or
            more than 1,000.
    """
    found: dict[str, tuple[int, NamedKey]] = {}
    for at, line in enumerate(text.splitlines(), 1):
        if not (said := line.strip()) or said.startswith("#"):
            continue
        key = _of_line(said, f"line {at} of {where}")
        if (before := found.get(key.key)) is not None:
            raise UsageError(f"lines {before[0]} and {at} of {where} have the same key")
        found[key.key] = at, key
    if not 0 < len(found) <= KEYS_MOST:
        said = f"{len(found):,} keys; the limit is {KEYS_MOST:,}" if found else "no key"
        raise UsageError(f"{where} has {said}", hint=_HINT)
    keys = [key for _, key in found.values()]
    if len(keys) > 1:
        for at, key in found.values():
            if key.name == "":
                raise UsageError(f"line {at} of {where} has a key without a name", hint=_HINT)
    return [NamedKey(each.name or DEFAULT, each.key) for each in keys]


def _of_line(said: str, where: str) -> NamedKey:
    """Returns the key of one line; its name is empty if it has none. Raises: UsageError: it is malformed."""
    named = _NAMED.fullmatch(said)
    found = NamedKey(named[1], named[2]) if named else NamedKey("", said)
    is_whole = named is not None or (_KEY.fullmatch(said) is not None and ":" not in said)
    if not is_whole or len(found.key) > KEY_CHARS_MOST:
        raise UsageError(f"{where} is not a valid key", hint=_HINT)
    return found


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
