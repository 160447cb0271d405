"""peft is the judge: what it saves gives, merged by kt, the weights that it merges; what kt writes gives its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    difference,
    load_peft,
    merged,
    quietly,
    save,
)
from convert import convert

from ktcli.adapters.adapter import Adapter
from ktcli.adapters.export import AdapterLayout, Exporter
from ktcli.adapters.folder import open_adapter
from ktcli.adapters.merged import MergedAdapter
from ktcli.errors import BadCheckpoint
from ktcli.weights.checkpoint import Checkpoint
from ktcli.weights.conversion import Source
from ktcli.weights.convert import convert_source
from ktcli.weights.recipe import Recipe as PackRecipe

pytestmark = NEEDS_PEFT

PATTERNS = (
    ("rank_pattern", {"q_proj": 1, r"layers\.1\.mlp\.experts\.down_proj": 64}),
    ("alpha_pattern", {"q_proj": 2, r".*\.gate_up_proj": 8}),
)
VARIANTS = {
    "ranks and alphas by patterns": Recipe("qwen3", ("q_proj", "o_proj"), EXPERTS, PATTERNS),
    "rslora, alpha 2r": Recipe(
        "qwen3", ("v_proj",), EXPERTS, (("use_rslora", True), ("lora_alpha", 8))
    ),
    "rank 1": Recipe("qwen3", (), EXPERTS, (("r", 1),)),
    "rank 64": Recipe("gpt-oss", (), EXPERTS, (("r", 64),)),
    "only gate and up": Recipe("qwen3", (), EXPERTS[:1]),
    "only down": Recipe("gpt-oss", (), EXPERTS[1:]),
    "mixtral's names of modules": Recipe("mixtral", ("w1", "w2", "w3", "gate")),
    "all linear": Recipe("qwen3-dense", "all-linear"),
    "a regular expression": Recipe("qwen3-dense", r".*\.(q|k)_proj"),
    "norms": Recipe("qwen3", ("q_proj",), (), (("modules_to_save", ["input_layernorm", "norm"]),)),
    "some layers": Recipe("qwen3-dense", ("q_proj",), (), (("layers_to_transform", [1]),)),
}

# Of the variants, `make test` runs those that differ most from the others.
FIRST = ("ranks and alphas by patterns", "mixtral's names of modules", "norms")
CASES = [
    *WHOLE,
    *(
        each if each in FIRST else pytest.param(each, marks=pytest.mark.thorough)
        for each in VARIANTS
    ),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """The random checkpoint of a family, written once."""
    made: dict[str, Base] = {}
    folder = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Base:
        return made.setdefault(name, made.get(name) or base_of(name, folder))

    return base


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", CASES)
def test_merged_weights_are_those_that_peft_merges(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    recipe = (WHOLE | VARIANTS)[name]
    base = bases(recipe.family)
    trained = adapted(base, recipe)
    folder = save(trained, tmp_path / "adapter")
    expected = merged(trained, tmp_path / "merged")
    with open_adapter(folder, base.model) as adapter:
        worst, changed = difference(adapter, base, expected)
    assert worst < 1e-6 and changed


def test_the_measure_sees_a_wrong_packing(
    bases: Callable[[str], Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B read as A is packed: as far from peft as no update at all."""
    from ktcli.adapters import factors

    base = bases("qwen3")
    trained = adapted(base, Recipe("qwen3", (), EXPERTS))
    folder = save(trained, tmp_path / "adapter")
    expected = merged(trained, tmp_path / "merged")
    right = factors.Factor.values

    def wrong(self: Any, files: Any) -> Any:
        values = right(self, files)
        if self.packing is not factors.FactorPacking.IN_TURN:
            return values
        count, rows, columns = self.shape
        return values.transpose(1, 2, 0).reshape(rows, count, columns).transpose(1, 0, 2)

    monkeypatch.setattr(factors.Factor, "values", wrong)
    with open_adapter(folder, base.model) as adapter:
        worst, _ = difference(adapter, base, expected)
    assert worst > 0.1


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_a_merged_pack_is_that_of_peft_s_merged_checkpoint(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    """To the last byte, in bf16 and in int8, where the factors of the head's columns are those of merged weights."""
    base = bases(name)
    trained = adapted(base, WHOLE[name])
    folder = save(trained, tmp_path / "adapter")
    expected = merged(trained, tmp_path / "merged")
    (expected / "config.json").write_bytes((base.folder / "config.json").read_bytes())
    for formats in (("bf16", "bf16"), ("int8", "int8")):
        recipe = PackRecipe.named(*formats)
        ours, theirs = (tmp_path / f"{which}-{formats[0]}" for which in ("ours", "theirs"))
        with Checkpoint(base.folder) as plain, open_adapter(folder, base.model) as adapter:
            change = MergedAdapter(adapter, base.model.tensors, plain)
            report = convert_source(Source("x", plain.changed(change)), ours, recipe, POOL)
            assert report.manifest.adapter == adapter.digest
        convert(expected, theirs, recipe, POOL)
        for path in theirs.glob("*.safetensors"):
            assert path.read_bytes() == (ours / path.name).read_bytes(), path.name


# --- what kt writes -----------------------------------------------------------------------------


def same_updates(ours: Adapter, theirs: Adapter) -> bool:
    """Whether two adapters have the same factors, number by number."""
    found, wanted = (
        {p.target.name: (p, a) for a in (each,) for p in a.pairs} for each in (ours, theirs)
    )
    return found.keys() == wanted.keys() and all(
        found[name][0].scale == wanted[name][0].scale
        and all(
            np.array_equal(x, y)
            for x, y in zip(
                ours.values(found[name][0]), theirs.values(wanted[name][0]), strict=True
            )
        )
        for name in found
    )


def written(adapter: Adapter, base: Base, folder: Path, layout: AdapterLayout) -> Path:
    folder.mkdir()
    Exporter(adapter, base.model).write(folder, layout)
    return folder


def logits(base: Base, folder: Path) -> torch.Tensor:
    """Of the base with an adapter that peft loads; every tensor of the file must be taken."""
    ids = torch.arange(24)[None] * 7 % 99
    with quietly(), torch.no_grad():
        model = load_peft(base.load(), folder).eval()
        return model(ids).logits


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_for_peft(name: str, bases: Callable[[str], Base], tmp_path: Path) -> None:
    """Read again it is the same, and peft gives the logits that it gave with its own files."""
    recipe = (WHOLE | VARIANTS)[name]
    base = bases(recipe.family)
    folder = save(adapted(base, recipe), tmp_path / "adapter")
    with open_adapter(folder, base.model) as adapter:
        again = written(adapter, base, tmp_path / "again", AdapterLayout.PEFT)
        with open_adapter(again, base.model) as other:
            assert same_updates(adapter, other) and not other.notes
            assert {g.module for g in other.gains} == {g.module for g in adapter.gains}
    assert torch.equal(logits(base, folder), logits(base, again))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v3",
        "gpt-oss",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("qwen3", "mixtral")),
    ],
)
def test_layouts_of_experts_and_back(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    """Modules of each expert, and back: gate and up then have twice the rank. All merge to the same weights."""
    base = bases(name)
    trained = adapted(base, WHOLE[name])
    folder = save(trained, tmp_path / "adapter")
    expected = merged(trained, tmp_path / "merged")
    with open_adapter(folder, base.model) as adapter:
        each = written(adapter, base, tmp_path / "each", AdapterLayout.EACH)
        apart = written(adapter, base, tmp_path / "apart", AdapterLayout.KT_KERNEL)
    with open_adapter(each, base.model) as adapter:
        assert difference(adapter, base, expected)[0] < 1e-6
        back = written(adapter, base, tmp_path / "back", AdapterLayout.PEFT)
    with open_adapter(back, base.model) as adapter:
        assert difference(adapter, base, expected)[0] < 1e-6
        assert {p.rank for p in adapter.pairs if p.target.name.endswith("gate_up_proj")} == {8}
    with open_adapter(apart, base.model) as adapter:  # bf16: 8 bits of each factor
        assert 0 < difference(adapter, base, expected)[0] < 0.02
        assert not adapter.notes
    assert torch.allclose(logits(base, folder), logits(base, back), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_peft_loads_modules_of_each_expert(
    name: str, bases: Callable[[str], Base], tmp_path: Path
) -> None:
    """Of models without shared experts; with them it maps those to routed ones."""
    base = bases(name)
    folder = save(adapted(base, Recipe(name, ATTENTION, EXPERTS)), tmp_path / "adapter")
    with open_adapter(folder, base.model) as adapter:
        each = written(adapter, base, tmp_path / "each", AdapterLayout.EACH)
    assert torch.allclose(logits(base, folder), logits(base, each), atol=1e-4)


# --- what peft itself gets wrong ----------------------------------------------------------------


def test_shared_experts_as_target_modules(bases: Callable[[str], Base], tmp_path: Path) -> None:
    """peft 0.21 trains routed experts of twice the rank instead. What it saved is read as what it is, and said; with
    the config that the user wrote it is refused."""
    import json

    base = bases("deepseek-v3")
    modules = tuple(f"shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    trained = adapted(base, Recipe("deepseek-v3", modules))
    folder = save(trained, tmp_path / "adapter")
    expected = merged(trained, tmp_path / "merged")
    with open_adapter(folder, base.model) as adapter:
        assert {part.value for part in adapter.parts} == {"routed experts"}
        assert "nothing was trained in shared experts" in adapter.notes[-1]
        assert difference(adapter, base, expected)[0] < 1e-6
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {
        "target_modules": list(modules),
        "target_parameters": None,
    }
    path.write_text(json.dumps(config))
    with pytest.raises(
        BadCheckpoint, match="peft maps shared experts to routed ones without warning"
    ):
        open_adapter(folder, base.model)


def test_methods_that_are_refused(bases: Callable[[str], Base], tmp_path: Path) -> None:
    base = bases("qwen3-dense")
    for at, (more, said) in enumerate(
        (
            ((("use_dora", True),), "DoRA"),
            ((("bias", "lora_only"),), "trained biases"),
            ((("init_lora_weights", "pissa"),), "a changed base model"),
            ((("trainable_token_indices", [1, 2]),), "trained or added tokens"),
        )
    ):
        folder = save(
            adapted(base, Recipe("qwen3-dense", ("q_proj",), (), more)), tmp_path / str(at)
        )
        with pytest.raises(BadCheckpoint, match=said):
            open_adapter(folder, base.model)
