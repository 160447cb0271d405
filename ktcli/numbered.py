"""Names the files that belong together by number: NAME-00001-of-00003.gguf, NAME-00002-of-00003.gguf …"""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")


def numbered_set(name: str) -> list[str]:
    """Returns the names of all files of a numbered set, in order, by the name of one of them ("a-00001-of-00003.gguf");
    the name alone, if it has no number.
    """
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return [name]
    stem, _, count, suffix = found.groups()
    return [f"{stem}-{i:05}-of-{count}{suffix}" for i in range(1, int(count) + 1)]
