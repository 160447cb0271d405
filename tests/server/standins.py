"""Programs in the place of engines that kt runs: the environment they lie in, and what a test sees of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ktcli.store import engines


@dataclass(frozen=True)
class StandIn:
    """An environment with a program in the place of another.

    Attributes:
        package: the folder of its package.
    """

    package: Path

    def does(self, how: str) -> None:
        """Lets it behave like this from its next start on."""
        (self.package / "behaviour").write_text(how)

    def dies(self) -> None:
        """Lets it fail now if it is to fail later, and again at each start."""
        (self.package / "dies").touch()

    @property
    def words(self) -> list[str]:
        """Its last command line."""
        found: list[str] = json.loads((self.package / "words").read_text())
        return found

    @property
    def seen(self) -> bytes:
        """The words of its process as every user of the machine sees them."""
        return (self.package / "seen").read_bytes()

    @property
    def pids(self) -> list[int]:
        """The processes that were started and came to write their numbers, in order, and then their workers."""
        found = [self.package / name for name in ("starts", "workers")]
        return [int(each) for path in found if path.exists() for each in path.read_text().split()]

    @property
    def starts(self) -> int:
        """How often it was started."""
        return len((self.package / "starts").read_text().split())


def make_environment(row: engines.ExternalEngine, path: Path) -> Path:
    """Makes the environment of an engine without its packages, which it says it has; returns where they would lie."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    (packages,) = path.glob("lib/python3*/site-packages")
    for each in row.packages:
        stem = each.name.replace("-", "_")
        (packages / f"{stem}-{each.version}.dist-info").mkdir()
    said = {"packages": {each.name: each.version for each in row.packages}}
    (path / engines.MANIFEST).write_text(json.dumps(said))
    return packages


class Log:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    warn = note
