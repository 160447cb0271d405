"""peft is the judge of adapters beside the model: its logits with the adapter loaded, on the pack's own weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters.judge import (
    ATTENTION,
    EXPERTS,
    NEEDS_PEFT,
    POOL,
    WHOLE,
    Base,
    Recipe,
    adapted,
    base_of,
    everything,
    save,
)
from convert import convert
from cores import TWO
from reference import ONE_OF_EACH, case_named, write_checkpoint
from timelines import logits_of

from benchmarks.loading import load_pack
from ktcli.adapters.folder import open_adapter
from ktcli.adapters.packed import PackedAdapter, pack_adapter
from ktcli.assembly.request import Wanted
from ktcli.engine import Engine
from ktcli.planner.memory import AdapterRoom
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe as PackRecipe

pytestmark = NEEDS_PEFT

NORMS = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"]
CASES = {
    "modules of each expert": Recipe("mixtral", ("w1", "w2", "w3", "gate", *ATTENTION)),
    "rank 1, only gate and up": Recipe("qwen3", (), EXPERTS[:1], (("r", 1),)),
    "rank 64, only down": Recipe("gpt-oss", (), EXPERTS[1:], (("r", 64),)),
    "norms": Recipe("qwen3", ("q_proj",), (), (("modules_to_save", NORMS),)),
    "norms of 1 + weight": Recipe("gemma3", ("q_proj",), (), (("modules_to_save", NORMS),)),
    "norms without the mean": Recipe(
        "command-a-plus", ("q_proj",), (), (("modules_to_save", NORMS),)
    ),
    "ranks by patterns": Recipe(
        "qwen3",
        ("q_proj", "v_proj"),
        EXPERTS,
        (("rank_pattern", {"q_proj": 1, r"layers\.1\.mlp\.experts\.down_proj": 7}),),
    ),
}
N_TOKENS = 70
# Of the others the routers, which random updates change, are undecided at too many positions to compare all of them.
DECIDED = ("qwen3-dense", "qwen3", "gpt-oss")
# peft can wrap no family that transformers lacks.
FAMILIES = [case.name for case in ONE_OF_EACH if not case.borrowed]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """The random checkpoint of a family, written once."""
    made: dict[str, Base] = {}
    folder = tmp_path_factory.mktemp("bases")
    return lambda name: made.get(name) or made.setdefault(name, base_of(name, folder))


def packed(folder: Path, base: Base, recipe: PackRecipe, *, exact: bool) -> PackedAdapter:
    with open_adapter(folder, base.model) as adapter:
        return pack_adapter(adapter, folder.name, recipe, exact=exact)


def engine_with(pack: Path, adapter: PackedAdapter, *, exact: bool) -> Engine:
    room = AdapterRoom(1, adapter.ranks, adapter.size_bytes)
    wanted = Wanted(exact=exact, all_logits=True, threads=TWO, adapters=room)
    return load_pack(pack, wanted, adapter=adapter)


def logits(engine: Engine, ids: list[int], sizes: tuple[int, ...]) -> np.ndarray:
    session, rows, at = engine.session(), [], 0
    for size in sizes:
        rows.append(logits_of(session, ids[at : at + size]))
        at += size
    while at < len(ids):
        rows.append(logits_of(session, ids[at : at + 1]))
        at += 1
    return np.concatenate(rows)


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", CASES)
def test_exact_logits_are_those_of_peft(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    base, recipe = bases(CASES[name].family), PackRecipe.named("f32", "f32")
    trained = adapted(base, CASES[name])
    folder = save(trained, tmp_path / "adapter")
    convert(base.folder, tmp_path / "pack", recipe, POOL)
    ids = np.random.default_rng(1).integers(0, 99, N_TOKENS).tolist()
    with torch.no_grad():
        expected = trained(torch.tensor([ids])).logits[0].numpy()
        with trained.disable_adapter():
            without = trained(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(expected - without).max() > 0.1 * without.std()
    engine = engine_with(
        tmp_path / "pack",
        packed(folder, base, Pack.open(tmp_path / "pack").recipe, exact=True),
        exact=True,
    )
    found = logits(engine, ids, (50,))
    assert np.abs(found - expected).max() <= 1e-4 * expected.std()


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_with_everything_adapted(name: str, tmp_path: Path) -> None:
    """Exactly, and as a chat has it: there the median over positions, as a router may decide otherwise at some, and the
    later ones follow."""
    case = case_named(name)
    base = Base(name, write_checkpoint(case, tmp_path / name))
    trained = adapted(base, everything(base), size=0.1)
    folder = save(trained, tmp_path / "adapter")
    ids = np.random.default_rng(3).integers(0, 99, N_TOKENS).tolist()
    with torch.no_grad():
        expected = trained(torch.tensor([ids])).logits[0].numpy()
        with trained.disable_adapter():
            without = trained(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(expected - without).max() > 0.1 * without.std()
    off = {}
    for fmt in ("f32", "bf16"):
        recipe, exact = PackRecipe.named(fmt, fmt), fmt == "f32"
        convert(base.folder, tmp_path / fmt, recipe, POOL)
        adapter = packed(folder, base, Pack.open(tmp_path / fmt).recipe, exact=exact)
        engine = engine_with(tmp_path / fmt, adapter, exact=exact)
        off[fmt] = (logits(engine, ids, (50,)) - expected) / expected.std()
    assert np.abs(off["f32"]).max() <= 1e-4
    assert np.median(np.sqrt((off["bf16"] ** 2).mean(axis=1))) <= 0.03


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", DECIDED)
def test_fast_logits_are_close(name: str, bases: Callable[[str], Base], tmp_path: Path) -> None:
    """With activations and factors as a chat has them, on weights that bf16 holds; an undecided router is let off."""
    base = bases(WHOLE[name].family)
    trained = adapted(base, WHOLE[name])
    with torch.no_grad():
        for part, value in trained.named_parameters():
            if "lora_" not in part:
                value.copy_(value.bfloat16().float())
    folder = save(trained, tmp_path / "adapter")
    convert(base.folder, tmp_path / "pack", PackRecipe.named("bf16", "bf16"), POOL)
    ids = np.random.default_rng(2).integers(0, 99, N_TOKENS).tolist()
    with torch.no_grad():
        expected = trained(torch.tensor([ids])).logits[0].numpy()
    recipe = Pack.open(tmp_path / "pack").recipe
    engine = engine_with(tmp_path / "pack", packed(folder, base, recipe, exact=False), exact=False)
    off = (logits(engine, ids, (50,)) - expected) / expected.std()
    rows = np.sort(np.sqrt((off**2).mean(axis=1)))
    assert np.sqrt((rows[: int(0.95 * len(rows))] ** 2).mean()) <= 0.03, rows[-8:]
