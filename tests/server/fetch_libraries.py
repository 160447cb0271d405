"""Fetches the libraries of the chat page with npm, checks them, and writes them where they are shipped. `make page`.

The accessibility checker of the tests comes along; it goes into build/page/ and is not shipped.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ktcli.server.http.page.libraries import LIBRARIES, Library  # noqa: E402

VENDOR = ROOT / "ktcli/server/http/page/vendor"
CACHE = ROOT / "build/page"
AXE = Library(
    "axe-core",
    "4.14.1",
    "MPL-2.0",
    "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
    {"axe.min.js": "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"},
    stem="axe",
)


def checked(what: str, data: bytes, sha256: str) -> bytes:
    """Returns the data if they have the pinned hash."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        sys.exit(f"checksum mismatch: {what} has SHA-256 {found}, not {sha256 or '(not pinned)'}")
    return data


def fetched(library: Library) -> Mapping[str, bytes]:
    """Returns the files of a library by their names in `vendor/`.

    Only members that the table names are read, into memory: an archive writes nothing by itself.
    """
    wanted = f"{library.package}@{library.version}"
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", wanted]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archive = next(Path(folder).glob("*.tgz"))
        checked(wanted, archive.read_bytes(), library.tarball_sha256)
        found = {}
        with tarfile.open(archive) as members:
            for path, name, sha256 in library.files:
                member = members.extractfile(f"package/{path}")
                assert member is not None, path
                found[name] = checked(f"{wanted} {path}", member.read(), sha256)
        return found


def main() -> None:
    for folder, libraries in ((VENDOR, LIBRARIES), (CACHE, (AXE,))):
        files = {name: data for each in libraries for name, data in fetched(each).items()}
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.name not in files:
                old.unlink()
        for name, data in files.items():
            (folder / name).write_bytes(data)
            print(f"{len(data):>9,} B  {(folder / name).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
