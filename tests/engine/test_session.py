"""Laws of a timeline: how ids are fed never matters, going back leaves no trace, errors change nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from cores import TWO
from loading import load_engine
from peak import PEAK
from reference import case_named, write_checkpoint
from timelines import advance, interrupted

from ktcli.engine import Engine
from ktcli.engine.loader import PackSource, load
from ktcli.engine.logits import Logits
from ktcli.engine.session import Session
from ktcli.errors import BadPack, ContextFull, UsageError
from ktcli.models import build
from ktcli.native import Pool
from ktcli.weights.pack import Pack

CONTEXT = 200
IDS = np.random.default_rng(0).integers(0, 99, 150).tolist()


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = case_named(request.param)
    folder = tmp_path_factory.mktemp(case.name)
    checkpoint = write_checkpoint(case, folder / "checkpoint")
    return convert_checkpoint(checkpoint, folder / "pack", experts="int4", dense="int8")


@pytest.fixture(scope="module")
def engine(pack: Path) -> Engine:
    """Latent attention has two forms, for few and for many tokens, that agree within the rounding of
    bf16; in f32 the laws hold for it as for the others."""
    exact = "deepseek" in pack.parent.name
    return load_engine(pack, context=CONTEXT, threads=TWO, exact=exact, streams=3)


@pytest.fixture(autouse=True)
def nothing_known(engine: Engine) -> None:
    """What another test computed is not found in this one."""
    engine.pools.forget()


def feed(session: Session, ids: list[int]) -> np.ndarray:
    return session.feed(ids).values.copy()


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 1e-5 * b.std())


def test_whole_pieces_and_one_by_one_agree(engine: Engine) -> None:
    whole = feed(engine.session(), IDS)
    pieces, single = engine.session(), engine.session()
    for start in range(0, len(IDS), 37):
        in_pieces = feed(pieces, IDS[start : start + 37])
    for token in IDS:
        one_by_one = feed(single, [token])
    assert close(in_pieces, whole) and close(one_by_one, whole)
    assert pieces.ids == single.ids == tuple(IDS)


def test_going_back_and_forth_is_the_identity(engine: Engine) -> None:
    straight = feed(engine.session(), IDS)
    session = engine.session()
    session.feed(IDS[:100])
    session.feed([1, 2, 3] * 20)
    assert session.truncate(90) == 90
    assert close(feed(session, IDS[90:]), straight)


def test_advance_computes_only_what_is_new(engine: Engine) -> None:
    """Of latent attention also what is in another form than in a prompt of these ids."""
    session, latent = engine.session(), engine.pools.latent
    _, reused = advance(session, IDS[:80])
    assert reused == 0
    logits, reused = advance(session, IDS)
    assert reused == (64 if latent else 80)
    assert close(logits.values.copy(), feed(engine.session(), IDS))
    engine.pools.forget()
    logits, reused = advance(session, [*IDS[:50], 7])
    assert reused == (0 if latent else 50) and session.ids == (*IDS[:50], 7)
    before = logits.values.copy()
    again, reused = advance(session, [*IDS[:50], 7])
    # The last one is computed: its logits are wanted.
    assert reused == 50 and close(again.values, before)


def test_sessions_do_not_disturb_each_other(engine: Engine) -> None:
    first, second = engine.session(), engine.session()
    first.feed(IDS[:70])
    second.feed(IDS[70:])
    assert close(feed(first, IDS[70:]), feed(engine.session(), IDS))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_come_with_their_summary(engine: Engine, temperature: float) -> None:
    given = engine.session().feed(IDS, temperature=temperature)
    made = Logits.of(given.values, temperature)
    assert given.best == made.best and given.temperature == temperature
    np.testing.assert_array_equal(given.peaks, made.peaks)
    if temperature:
        np.testing.assert_allclose(given.sums, made.sums, rtol=1e-5)


def test_a_full_context_changes_nothing(engine: Engine) -> None:
    session = engine.session()
    session.feed(IDS)
    with pytest.raises(ContextFull, match="needs 201 tokens, but the context holds 200"):
        session.feed([1] * 51)
    assert session.ids == tuple(IDS)
    session.feed([1] * 50)
    assert session.length == CONTEXT


@pytest.mark.parametrize("ids", [[], [99], [-1], [3, 10**12]])
def test_ids_that_are_none(engine: Engine, ids: list[int]) -> None:
    session = engine.session()
    with pytest.raises(UsageError):
        session.feed(ids)
    assert session.ids == ()


def test_an_interrupt_leaves_a_valid_prefix(pack: Path) -> None:
    exact = "deepseek" in pack.parent.name
    engine = load_engine(pack, context=512, threads=TWO, exact=exact, streams=2)
    ids = (IDS * 4)[:512]
    engine.max_tokens = 100  # smaller chunks: more places to stop

    session = engine.session()
    with interrupted(engine, 3), pytest.raises(KeyboardInterrupt):
        session.feed(ids)
    assert session.ids == tuple(ids[:200])
    assert close(feed(session, ids[200:]), feed(engine.session(), ids))


@pytest.mark.parametrize("context", [0, -1, 513])
def test_an_impossible_context_names_the_limit(pack: Path, context: int) -> None:
    with pytest.raises(UsageError, match="1 to 512"):
        load_engine(pack, context=context)


DECODE = (
    PEAK
    + """
import sys
from pathlib import Path
from benchmarks.loading import load_pack
from ktcli.assembly.request import Wanted
session = load_pack(Path(sys.argv[1]), Wanted(context=400, threads=TWO)).session()
session.feed(list(range(64)))
for _ in range(30):
    session.feed([5])
before = peak_kib()
for _ in range(300):
    session.feed([5])
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers"}),
      peak_kib() - before)
""".replace("TWO", str(TWO))
)


def test_decode_needs_no_torch_and_takes_no_memory(pack: Path) -> None:
    """The C test `test_allocations` counts malloc; here: 300 tokens grow the process by nothing
    but the pages of the cache they fill."""
    result = subprocess.run(
        [sys.executable, "-c", DECODE, str(pack)], capture_output=True, text=True, check=True
    )
    modules, grown_kib = result.stdout.split("] ")
    assert modules == "["
    assert int(grown_kib) < 1024


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_file_that_changes_between_opening_and_loading(
    pack: Path, how: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(pack, tmp_path / "copy"))
    opened = Pack.open(copy)
    if how == "cut":
        os.truncate(copy / "layer-00001.safetensors", 5000)
    else:
        (copy / "layer-00001.safetensors").unlink()
    with pytest.raises(BadPack, match=r"layer-00001\.safetensors cannot be") as caught:
        load(build(opened.config), opened.recipe, PackSource(opened, pool := Pool(1)), pool)
    assert caught.value.hint and "\n" not in str(caught.value)
