"""Laws of pages that rows of kernels share: what one writes another computes to the last bit, and reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.test_tier import FAMILIES, MORE, OTHERS
from hybrid import Made

from ktcli.native import isa_rows
from ktcli.store.pagefile import read_table

USABLE = {row.name for row in isa_rows() if row.usable}
SAME = ("avx2", "avx512")
FORMATS = (("int4", "int8"), ("bf16", "bf16"), ("int8", "int8"), ("nl4", "bf16"))
TESTS = Path(__file__).resolve().parents[1]
# A CPU without AVX-512 has other variants of NumPy's functions as well.
WITHOUT_AVX512 = {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX"}
# Answers a text above a store in the folder of each conversion: a prompt of two chunks, and eight tokens, one by one.
ANSWER = """
import sys
import warnings
from hashlib import sha256
from pathlib import Path
warnings.simplefilter("ignore")  # NumPy's, of features that this CPU has not
import numpy as np
from loading import load_engine
from ktcli.assembly.kvpages import store_below
from ktcli.native import Batch
from ktcli.store.pagefolder import PageFolder
home, packs = Path(sys.argv[1]), sys.argv[2:]
for pack in packs:
    engine = load_engine(Path(pack), context=320, threads=1)
    ids = np.random.default_rng(7).integers(0, 99, 230).astype(np.int32)
    folder = PageFolder(home / Path(pack).parent.name)
    with store_below(engine, folder, 1 << 40, "m") as store:
        line = engine.sequence()
        reused = line.adopt(ids, bring=True)
        rest, rows = ids[reused:], []
        while len(rows) < 8:
            run = line.extend(rest[: min(150, line.until_mark(rest.size))])
            logits = engine.run(Batch((run,)))[-1]
            rest = rest[run.ids.size :]
            if not rest.size:
                rows.append(logits.values.tobytes())
                rest = np.array([logits.best], np.int32)
            line.commit(run)
        line.close()
    print(reused, store.counts.read, sha256(b"".join(rows)).hexdigest())
"""


class Answered(NamedTuple):
    """The positions reused, the records read, and a hash of the logits."""

    reused: int
    read: int
    logits: str


def answered(isa: str, home: Path, packs: Sequence[Path]) -> list[Answered]:
    """What a new process with a row of kernels says of each conversion."""
    path = os.pathsep.join((str(TESTS), *sys.path))
    environment = {**os.environ, "KT_ISA": isa, "PYTHONPATH": path}
    environment |= WITHOUT_AVX512 if isa == "avx2" else {}
    words = [sys.executable, "-c", ANSWER, str(home), *map(str, packs)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = (line.split() for line in done.stdout.splitlines())
    return [Answered(int(reused), int(read), logits) for reused, read, logits in found]


def records(folder: Path) -> dict[tuple[str, int, bytes], bytes]:
    """The bytes of all pages, window pages and states, by namespace, kind and key."""
    found = {}
    for path in folder.glob("*/*.pages"):
        space, entries = read_table(path)
        data = path.read_bytes()
        for each in entries:
            head = each.offset + each.head_bytes
            kept = data[each.offset : head + each.size_bytes]
            found[space.namespace.hex(), each.kind, each.key] = kept
    return found


def check(packs: list[Path], tmp_path: Path) -> None:
    """Both rows store the same, and each goes on from what the other stored as it does by itself."""
    alone = {isa: answered(isa, tmp_path / isa, packs) for isa in SAME}
    for pack in packs:
        one, other = (records(tmp_path / isa / pack.parent.name) for isa in SAME)
        assert one and one == other, pack
    for isa, theirs in zip(SAME, reversed(SAME), strict=True):
        came = answered(isa, tmp_path / theirs, packs)
        assert [each.logits for each in came] == [each.logits for each in alone[isa]]
        # Where layers keep states, only what ends with one is read.
        assert not any(each.read for each in alone[isa]) and any(each.read for each in came)


def converted(names: Sequence[str], formats: Sequence[tuple[str, str]], folder: Path) -> list[Path]:
    made = []
    for number, name in enumerate(names):
        experts, dense = formats[number % len(formats)]
        of = folder / f"{name}-{experts}-{dense}"
        made.append(Made.convert(name, of, experts=experts, dense=dense).path)
    return made


pytestmark = pytest.mark.skipif(not {*SAME} <= USABLE, reason=f"this CPU lacks one of {SAME}")


def test_avx2_and_avx512_share_pages(tmp_path: Path) -> None:
    check(converted(["qwen3"], FORMATS, tmp_path / "made"), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("turn", range(len(FORMATS)))
@pytest.mark.rotates(4)
def test_avx2_and_avx512_share_pages_in_every_family(tmp_path: Path, turn: int) -> None:
    """Each family with one format, and with the next one in the next turn."""
    formats = FORMATS[turn:] + FORMATS[:turn]
    check(converted([*FAMILIES, *MORE, *OTHERS], formats, tmp_path / "made"), tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif("avx512bf16" not in USABLE, reason="this CPU lacks avx512bf16")
def test_a_row_whose_bits_may_differ_has_pages_of_its_own(tmp_path: Path) -> None:
    packs = converted(["qwen3"], FORMATS, tmp_path / "made")
    for isa in ("avx512", "avx512bf16"):
        answered(isa, tmp_path / "home", packs)
    assert (
        len({namespace for namespace, _, _ in records(tmp_path / "home" / packs[0].parent.name)})
        == 2
    )


@pytest.mark.thorough
@pytest.mark.skipif("amx" not in USABLE, reason="this CPU lacks AMX")
def test_two_libraries_share_pages_though_they_measured_tiles_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = converted(["qwen3"], FORMATS, tmp_path / "made")
    for least in ("2", "24"):
        monkeypatch.setenv("KT_TILE_MIN", least)
        (last,) = answered("amx", tmp_path / "home", packs)
    assert last.read
