"""Reads the small text files of `/proc` and `/sys`, under any root; missing files are None.

A value is believed only if the kernel could have written it: anything else is as if it were
missing. `cpu_list` alone refuses, since people write such lists, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path


def read(path: Path) -> str | None:
    """Returns the text of a file without surrounding white space; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Returns the integer, possibly negative, that a file holds as text; None if it cannot be read or holds anything
    else, such as "max".
    """
    text = read(path) or ""
    number = whole(text.removeprefix("-"))
    return -number if number is not None and text.startswith("-") else number


_DIGITS = 20  # digits of the largest number that a kernel writes, 2^64 - 1


def whole(text: str) -> int | None:
    """Returns the value of a text of up to 20 decimal digits; None for any other text."""
    plain = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    return int(text) if plain else None


MAX_CPUS = 1 << 16  # eight times what Linux can be built for


def listed(text: str | None) -> tuple[int, ...]:
    """Returns the numbers in a list in the kernel's notation ("0-3,8") in ascending order; empty if the text is None or
    not such a list.
    """
    try:
        return cpu_list(text)
    except ValueError:
        return ()


def cpu_list(text: str | None) -> tuple[int, ...]:
    """Returns the numbers in a list in the kernel's notation, "0-3,8,10-11", in ascending order.

    Raises:
        ValueError: not such a list, or a number no machine has.
    """
    numbers: set[int] = set()
    count = 0  # numbers as listed: a short text could name all of them a thousand times
    for part in (text or "").replace("\n", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if first:
            start, end = int(first), int(last if dash else first)
            count += max(0, end + 1 - start)
            if end >= MAX_CPUS or count > MAX_CPUS:
                raise ValueError(f"CPU number {end} is higher than on any machine")
            numbers.update(range(start, end + 1))
    return tuple(sorted(numbers))


def cpu_text(numbers: Iterable[int]) -> str:
    """Returns the numbers as a list in the kernel's notation, "0-3,8"; the inverse of `cpu_list`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def numbered(what: str, numbers: Collection[int]) -> str:
    """Returns a noun, in the plural unless there is one number, followed by the numbers as a list: "node 2", "CPUs
    0-31".
    """
    return f"{what}{'' if len(numbers) == 1 else 's'} {cpu_text(numbers)}"


def table(text: str | None) -> dict[str, str]:
    """Returns the values of the "Key: value" lines of a text such as /proc/meminfo, by key; {} if `text` is None. Lines
    without a colon are skipped; the first of equal keys wins.
    """
    pairs: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            pairs.setdefault(key.strip(), value.strip())
    return pairs


def kib(value: str | None) -> int | None:
    """Returns the bytes of a /proc/meminfo value such as "131072 kB"; None if it is None or has no number."""
    number = whole((value or "").split(" ")[0])
    return None if number is None else number * 1024
