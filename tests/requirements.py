"""Prints what kt needs with one of its extras, as pip reads it, but for kt itself: python tests/requirements.py test"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
OWN = re.compile(r"ktcli\[([\w,-]+)\]")


def requirements(extra: str) -> list[str]:
    """The lines of pyproject.toml for kt with an extra, and with those that it names; sorted, each once."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]

    def of(name: str) -> Iterator[str]:
        for line in project["optional-dependencies"][name]:
            if own := OWN.fullmatch(line):
                for each in own[1].split(","):
                    yield from of(each)
            else:
                yield line

    return sorted({*project["dependencies"], *of(extra)})


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
