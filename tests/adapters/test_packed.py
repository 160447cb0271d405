"""The factors in memory as kernels read them, from every layout and type of files, against loops in plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.fake_adapter import (
    FUSED,
    PREFIX,
    Arrays,
    E,
    H,
    I,
    deepseek,
    fused,
    linear,
    model,
    q_proj,
    write,
    write_arrays,
)
from numpy.typing import NDArray
from weights.fake_checkpoint import write_file

from ktcli.adapters.adapter import Adapter, LowRank
from ktcli.adapters.folder import open_adapter
from ktcli.adapters.packed import PackedAdapter, pack_adapter, packed_bytes
from ktcli.errors import BadCheckpoint
from ktcli.models import Model
from ktcli.native import Update
from ktcli.weights.recipe import Recipe

RECIPE = Recipe.named("f32", "f32")


def each_expert() -> Arrays:
    """Modules of each expert."""
    made: Arrays = {}
    for e in range(E):
        for seed, (name, n, k) in enumerate((("gate", I, H), ("up", I, H), ("down", H, I))):
            made |= linear(f"0.mlp.experts.{e}.{name}_proj", n, k, seed=10 * e + seed)
    return made


def up_alone() -> Arrays:
    return {name: values for name, values in each_expert().items() if ".up_proj." in name}


CASES: dict[str, tuple[Arrays, dict[str, Any], Model]] = {
    "fused": (fused() | q_proj(), FUSED | {"target_modules": ["q_proj"]}, model()),
    "each": (each_expert(), {"target_modules": ["gate_proj", "up_proj", "down_proj"]}, model()),
    "up": (up_alone(), {"target_modules": ["up_proj"]}, model()),
    "heads": (
        linear("1.self_attn.kv_b_proj", 4 * 44, 48), {"target_modules": ["kv_b_proj"]}, deepseek(),
    ),
}  # fmt: skip


def bits(values: NDArray[Any], exact: bool) -> NDArray[Any]:
    if exact:
        return values
    whole = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)


def unpacked(packed: Update, update: LowRank) -> tuple[NDArray[Any], NDArray[Any]]:
    """A and B as `Adapter.factors` has them; nothing else may be there."""
    (count, rank, k), (_, m, _) = update.shapes
    assert not packed.a[:, :, k:].any()
    b, left = np.zeros((len(packed.b), m, rank), packed.b.dtype), packed.b.copy()
    for at, row in enumerate(update.rows.tolist()):
        panel = (row // 16 - packed.first_panel) // packed.panel_step
        assert packed.first_panel + panel * packed.panel_step == row // 16
        b[:, at] = packed.b[:, panel, :, row % 16]
        left[:, panel, :, row % 16] = 0
    assert not left.any()
    a = packed.a[:, :, :k]
    return np.broadcast_to(a, (count, rank, k)), np.broadcast_to(b, (count, m, rank))


def packed(adapter: Adapter, exact: bool) -> PackedAdapter:
    return pack_adapter(adapter, "x", RECIPE, exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("case", CASES)
def test_every_number_is_where_kernels_read_it(
    tmp_path: Path, case: str, dtype: str, exact: bool
) -> None:
    arrays, config, base = CASES[case]
    folder = write(tmp_path, arrays, **config)
    write_arrays(folder / "adapter_model.safetensors", arrays, dtype)
    with open_adapter(folder, base) as adapter:
        found = packed(adapter, exact)
        each = {name: iter(updates) for name, updates in found.updates.items()}
        for update in adapter.updates:
            one = next(each[update.tensor.name])
            assert one.a.ctypes.data % 64 == one.b.ctypes.data % 64 == 0
            got = unpacked(one, update)
            for factor, values in zip(got, adapter.factors(update), strict=True):
                assert np.array_equal(factor, bits(values, exact))
        assert found.size_bytes == sum(packed_bytes(adapter, exact=exact))


def test_parts_of_two_types(tmp_path: Path) -> None:
    """A of one expert in another type than those of the others."""
    arrays, config, _ = CASES["each"]
    name = f"{PREFIX}0.mlp.experts.2.gate_proj.lora_A.weight"
    stored = {key: ("F32", values.shape, values.tobytes()) for key, values in arrays.items()}
    halves = arrays[name].astype(np.float16)
    stored[name] = ("F16", halves.shape, halves.tobytes())
    folder = write(tmp_path, arrays, **config)
    write_file(folder / "adapter_model.safetensors", stored, {"format": "pt"})
    with open_adapter(folder, model()) as adapter:
        found = packed(adapter, exact=True).updates["layers.0.mlp.experts.gate_up"]
        assert np.array_equal(found[0].a[2, :, :H], halves.astype(np.float32))
        assert np.array_equal(found[0].a[1, :, :H], arrays[name.replace(".2.", ".1.")])


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("letter", "AB")
def test_what_no_training_gives_is_refused_by_name(
    tmp_path: Path, letter: str, value: float
) -> None:
    arrays = fused()
    name = f"{PREFIX}0.mlp.experts.lora_{letter}.weight"
    arrays[name][-1, -1] = value
    with (
        open_adapter(write(tmp_path, arrays, **FUSED), model()) as adapter,
        pytest.raises(BadCheckpoint, match=rf"experts\.lora_{letter}\.weight in .* NaN or Inf"),
    ):
        packed(adapter, exact=False)
