"""The targets of a model follow from its declarations: each stored matrix has one, whose rows are all of it."""

from __future__ import annotations

import numpy as np
import pytest

from ktcli.adapters.targets import Targets, _aliases, own_spelling, rows_in, without_number
from ktcli.models import build
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.store import catalog

NAMES = [name for name in catalog.names() if not catalog.get(name).builtin]


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_a_published_model_has_a_target(name: str) -> None:
    model = build(catalog.get(name).config)
    targets = Targets(model)
    tied = {t.name for t in model.tensors if t.part is ModelPart.HEAD and len(t.sources) > 1}
    covered = {piece.tensor.name for target in targets.by_name.values() for piece in target.pieces}
    wanted = {t.name for t in model.tensors if t.role not in (Role.VECTOR, Role.TABLE)}
    assert covered == wanted - tied
    assert targets.norms
    for target in targets.by_name.values():
        rows = sum(piece.stored.rows for piece in target.pieces if not piece.stored.band)
        assert rows <= target.n * len({piece.tensor.name for piece in target.pieces})


@pytest.mark.parametrize(
    "name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b"]
)
def test_the_rows_of_an_alternative_are_each_row_once(name: str) -> None:
    """But for padding, which belongs to none."""
    for tensor in build(catalog.get(name).config).tensors:
        if tensor.role in (Role.VECTOR, Role.TABLE):
            continue
        for pieces in tensor.sources:
            rows = np.concatenate(rows_in(tensor, pieces))
            assert len(set(rows.tolist())) == len(rows) and rows.max() < tensor.n
            assert len(rows) == tensor.n or tensor.alternate


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", NAMES)
def test_other_spellings_mean_one_target(name: str) -> None:
    """But for one product that two layouts call differently."""
    targets = Targets(build(catalog.get(name).config))
    meant: dict[str, set[str]] = {}
    for alias, own in _aliases((*targets.by_name, *targets.norms)):
        meant.setdefault(alias, set()).add(own)
    for alias, names in meant.items():
        pieces = {p.tensor.name for n in names if (t := targets.find(n)) for p in t.pieces}
        assert len(names) == 1 or len(pieces) == 1, (alias, names)


def test_names() -> None:
    targets = Targets(build(catalog.get("mixtral-8x7b").config))
    name = "model.layers.3.block_sparse_moe.experts.{e}.w1"
    assert without_number(name.replace("{e}", "17")) == (name, 17)
    assert own_spelling(name) == "model.layers.3.mlp.experts.{e}.w1"
    assert targets.find(own_spelling(name)) is targets.find(name) is not None
    assert [t.name.rpartition(".")[2] for t in targets.fused("model.layers.3.mlp.experts")] == [
        "gate_up_proj",
        "down_proj",
    ]
    assert targets.find("model.layers.32.mlp.gate") is None
    assert targets.find("model.embed_tokens") is None
