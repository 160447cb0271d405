"""A library that this user may read and not write: its models are used, and whatever would change it says so.

Root may write everything, so under root the commands run in a process that has given up that right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands.test_library_commands import READERS as READERS_OF_ALL
from convert import convert
from store.fake_hub import serve
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import manifest
from ktcli.manifest import FileRecord, Manifest
from ktcli.native import Pool
from ktcli.resources import data_path
from ktcli.store import integrity
from ktcli.weights.recipe import Recipe

Said = tuple[int, str, str]

# Runs kt with each list of words of its input, and prints what each run returned and said.
RUNS = """
import contextlib, io, json, os, sys
from ktcli.main import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
# Becomes a program that may do with files only what their permissions say, also as root: PR_CAPBSET_DROP (24, of
# linux/prctl.h) of CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER (1 to 3, of linux/capability.h).
WITHOUT_RIGHTS = """
import ctypes, os, sys
for right in (1, 2, 3) if os.geteuid() == 0 else ():
    if ctypes.CDLL(None).prctl(24, right, 0, 0, 0):
        raise OSError("root keeps its rights here")
os.execv(sys.argv[1], sys.argv[1:])
"""


def run(lines: list[str], place: Path) -> dict[str, Said]:
    """What kt returns and says for each command line, run where nothing but `place` is written."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_RIGHTS, sys.executable, "-c", RUNS],
        input=json.dumps([line.split() for line in lines]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=place,
        env={**os.environ, "HOME": str(place)},
    )
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def close(folder: Path) -> Iterator[Path]:
    """Makes everything in a folder read-only; afterwards it can be removed again."""
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in paths:
        path.chmod(0o755)


@pytest.fixture(params=["all of it", pytest.param("all but its locks", marks=pytest.mark.thorough)])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    folder = tmp_path / "library"
    convert(
        data_path("profiles", "kt-mini"), folder / "packs" / "mine@int4-int8", Recipe(), Pool(1)
    )
    checkpoint = folder / "checkpoints" / "org--repo"
    random_checkpoint(checkpoint, QWEN3)
    files = [
        FileRecord(path.name, path.stat().st_size, integrity.digest(path))
        for path in checkpoint.iterdir()
    ]
    found = Manifest(tuple(files), "hf", "org/repo")
    (checkpoint / manifest.CHECKPOINT).write_bytes(found.encode())
    (folder / "locks").mkdir()
    monkeypatch.setenv("KT_HOME", str(folder))
    monkeypatch.setenv("KT_LIBRARIES", "off")
    for each in close(folder):
        if request.param != "all of it":
            (folder / "locks").chmod(0o755)
        yield each


READERS = [
    "list",
    "show mine",
    "verify mine",
    "chat mine hi -n 2",
    "path mine",
    "du",
    "export mine x.tar",
]
WRITERS = {  # which folder is named, if locks cannot be written, and if they can
    "pull org/new --yes": ("locks", "checkpoints/org--new"),
    "pull org/new --yes --stream": ("locks", "packs/org--new@int4-int8/.kt-stream"),
    "rm mine --yes": ("locks", "packs/mine@int4-int8"),
    "convert org/repo": ("locks", "packs/org--repo@int4-int8"),
    "alias a mine": ("locks", "aliases.json"),
    "import x.tar": ("locks", "packs/mine@int4-int8"),
}


def test_it_is_used_and_not_changed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, has_locks = tmp_path / "place", bool((home / "locks").stat().st_mode & 0o200)
    place.mkdir()
    before = sorted(home.rglob("*"))
    with serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        source = random_checkpoint(tmp_path / "source", QWEN3)
        hub.repositories["org/new"] = {path.name: path.read_bytes() for path in source.iterdir()}
        said = run([*READERS, *WRITERS], place)
    for line in READERS:
        assert said[line][0] == 0, said[line]
    for line, folders in WRITERS.items():
        code, _, err = said[line]
        assert code == 1, line
        assert f"{home / folders[has_locks]}" in err
        assert err.count("error: ") == 1 and "Permission denied\n  " in err  # and a hint
    assert sorted(home.rglob("*")) == before
    assert hub.sent["model.safetensors"] <= 2 * (64 << 10)  # its header, for each offer


@pytest.mark.thorough
def test_one_that_cannot_be_read_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "library"
    folder.mkdir(mode=0)
    monkeypatch.setenv("KT_HOME", str(folder))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = run([" ".join(words) for words in READERS_OF_ALL], tmp_path)
    folder.chmod(0o755)
    for line, (code, _, err) in found.items():
        assert code not in (0, 70), line
        assert err.count("error: ") == 1 and "Traceback" not in err
