"""Every layout is read as it was written; each trap of the layouts on disk is a test. Needs neither torch nor peft."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.fake_adapter import (
    CONFIG,
    FUSED,
    PREFIX,
    E,
    H,
    I,
    deepseek,
    fused,
    linear,
    model,
    q_proj,
    random,
    write,
    write_arrays,
)

from ktcli.adapters.adapter import Adapter, LowRank
from ktcli.adapters.factors import as_bf16
from ktcli.adapters.folder import open_adapter
from ktcli.errors import BadCheckpoint
from ktcli.models import Model

Arrays = dict[str, Any]


def updates(adapter: Adapter) -> dict[str, list[LowRank]]:
    """The updates by the name of the stored tensor."""
    found: dict[str, list[LowRank]] = {}
    for update in adapter.updates:
        found.setdefault(update.tensor.name, []).append(update)
    return found


def deltas(adapter: Adapter) -> Arrays:
    """scale · B A of each stored tensor, [count, n, k], as kernels are told to add it; row by row."""
    found: Arrays = {}
    for update in adapter.updates:
        a, b = adapter.factors(update)
        assert (a.shape, b.shape) == update.shapes
        assert len(set(update.rows.tolist())) == len(update.rows)
        tensor = update.tensor
        whole = found.setdefault(tensor.name, np.zeros((tensor.count, tensor.n, tensor.k)))
        for e in range(tensor.count):
            whole[e][update.rows] += update.scale * b[e].astype(float) @ a[e].astype(float)
    return found


def opened(folder: Path, base: Model | None = None) -> Adapter:
    return open_adapter(folder, base or model())


# --- where rows lie -----------------------------------------------------------------------------


def test_rows_of_fused_queries_keys_and_values(tmp_path: Path) -> None:
    arrays = q_proj() | linear("0.self_attn.v_proj", 48, H, seed=5)
    with opened(write(tmp_path, arrays, target_modules=["q_proj", "v_proj"])) as adapter:
        (q, v) = updates(adapter)["layers.0.attn.qkv"]
        assert q.rows.tolist() == list(range(96)) and v.rows.tolist() == list(range(144, 192))
        a, b = adapter.factors(q)
        assert np.array_equal(a[0], arrays[f"{PREFIX}0.self_attn.q_proj.lora_A.weight"])
        assert np.array_equal(b[0], arrays[f"{PREFIX}0.self_attn.q_proj.lora_B.weight"])
        assert q.scale == 1.5 and q.rank == 4


def test_gate_and_up_alternate_in_panels(tmp_path: Path) -> None:
    """I = 40 is padded to 48: no row of padding is changed."""
    with opened(write(tmp_path, fused(), **FUSED)) as adapter:
        (update,) = updates(adapter)["layers.0.mlp.experts.gate_up"]
        rows = update.rows.tolist()
        assert rows[:16] == list(range(16)) and rows[16:32] == list(range(32, 48))
        assert rows[40:56] == list(range(16, 32)) and rows[39] == 71
        assert update.tensor.n == 96 and len(rows) == 2 * I


def test_the_split_kv_b(tmp_path: Path) -> None:
    """Of 4 heads: 24 rows of keys, read both ways, then 20 of values."""
    arrays = linear("1.self_attn.kv_b_proj", 4 * 44, 48)
    folder = write(tmp_path, arrays, target_modules=["kv_b_proj"])
    with open_adapter(folder, deepseek()) as adapter:
        found = deltas(adapter)
        a, b = arrays.values()
        whole = 1.5 * (b.astype(float) @ a.astype(float)).reshape(4, 44, 48)
        assert np.allclose(found["layers.1.attn.uk_out"], whole[:, :24])
        assert np.allclose(found["layers.1.attn.uk_in"], whole[:, :24].swapaxes(1, 2))
        assert np.allclose(found["layers.1.attn.uv"], whole[:, 24:])


# --- the packing of experts ---------------------------------------------------------------------


def expected(arrays: Arrays, stem: str, r: int, k: int, n: int, scale: float = 1.5) -> np.ndarray:
    """scale · B A of each expert, element by element from peft's definition."""
    a, b = (arrays[f"{PREFIX}{stem}.lora_{letter}.weight"].astype(float) for letter in "AB")
    made = np.zeros((E, n, k))
    for e in range(E):
        for rho in range(r):
            made[e] += scale * np.outer(b[:, rho * E + e], a[e * r + rho])
    return made


@pytest.mark.parametrize("r", [1, 4, 64])
def test_columns_of_b_have_the_expert_fastest(tmp_path: Path, r: int) -> None:
    """And reading B as A is packed is another adapter, but for rank 1."""
    arrays = fused(r=r)
    folder = write(tmp_path, arrays, **FUSED, r=r, lora_alpha=1.5 * r)
    with opened(folder) as adapter:
        found = deltas(adapter)
    want = expected(arrays, "0.mlp.experts", r, I, H)
    assert np.allclose(found["layers.0.mlp.experts.down"], want)
    a, b = (arrays[f"{PREFIX}0.mlp.experts.lora_{x}.weight"].astype(float) for x in "AB")
    packed = 1.5 * np.einsum("oer,eri->eoi", b.reshape(H, E, r), a.reshape(E, r, I))
    assert np.allclose(want, packed) == (r == 1)
    both = expected(arrays, "0.mlp.experts.base_layer", r, H, 2 * I)
    stored = found["layers.0.mlp.experts.gate_up"].reshape(E, 3, 2, 16, H)
    gate = stored[:, :, 0].reshape(E, 48, H)[:, :I]
    assert np.allclose(gate, both[:, :I])
    assert np.allclose(stored[:, :, 1].reshape(E, 48, H)[:, :I], both[:, I:])


@pytest.mark.parametrize("down", [False, True])
def test_only_one_parameter_is_targeted(tmp_path: Path, down: bool) -> None:
    """It has no base_layer, whichever of the two it is."""
    arrays = fused(down=down, gate_up=not down)
    assert not any("base_layer" in name for name in arrays)
    name = "experts.down_proj" if down else "experts.gate_up_proj"
    folder = write(tmp_path, arrays, target_modules=None, target_parameters=[name])
    with opened(folder) as adapter:
        (pair,) = adapter.pairs
        assert pair.target.name.endswith(name)
        assert set(deltas(adapter)) == {
            f"layers.0.mlp.experts.{'down' if down else 'gate_up'}",
        }


def test_experts_with_modules_of_their_own_are_the_same(tmp_path: Path) -> None:
    """The same numbers, taken apart: the same updates, from twice the A."""
    arrays = fused()
    apart: Arrays = {}
    for stem, parts in (
        ("0.mlp.experts.base_layer", (("gate_proj", 0, I), ("up_proj", I, 2 * I))),
        ("0.mlp.experts", (("down_proj", 0, H),)),
    ):
        a, b = (arrays[f"{PREFIX}{stem}.lora_{letter}.weight"] for letter in "AB")
        b = b.reshape(len(b), 4, E)
        for e in range(E):
            for name, first, last in parts:
                each = f"{PREFIX}0.mlp.experts.{e}.{name}"
                apart[f"{each}.lora_A.weight"] = a[4 * e : 4 * e + 4]
                apart[f"{each}.lora_B.weight"] = np.ascontiguousarray(b[first:last, :, e])
    names = ["gate_proj", "up_proj", "down_proj"]
    with (
        opened(write(tmp_path / "fused", arrays, **FUSED)) as one,
        opened(write(tmp_path / "each", apart, target_modules=names)) as other,
    ):
        ours, theirs = deltas(one), deltas(other)
        assert len(one.pairs) == 2 and len(other.pairs) == 3 and set(ours) == set(theirs)
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def swapped(arrays: Arrays) -> Arrays:
    """The same updates as peft before 0.19.1 saved them: A [r E, out], B [in, r E]."""
    made = {}
    for stem in {name.rpartition(".lora_")[0] for name in arrays}:
        a, b = arrays[f"{stem}.lora_A.weight"], arrays[f"{stem}.lora_B.weight"]
        r, k, n = len(a) // E, a.shape[1], len(b)
        old_a = b.reshape(n, r, E).transpose(2, 1, 0).reshape(E * r, n)
        old_b = a.reshape(E, r, k).transpose(2, 1, 0).reshape(k, r * E)
        made[f"{stem}.lora_A.weight"] = np.ascontiguousarray(old_a)
        made[f"{stem}.lora_B.weight"] = np.ascontiguousarray(old_b)
    return made


def test_factors_that_old_peft_exchanged(tmp_path: Path) -> None:
    arrays = fused()
    with (
        opened(write(tmp_path / "new", arrays, **FUSED)) as new,
        opened(write(tmp_path / "old", swapped(arrays), **FUSED, peft_version="0.18.1")) as old,
    ):
        ours, theirs = deltas(new), deltas(old)
        assert all(np.allclose(ours[name], theirs[name], rtol=1e-12) for name in ours)


def test_square_experts_go_by_the_version_of_peft(tmp_path: Path) -> None:
    base = model(moe_intermediate_size=H)  # down is square
    arrays = linear("0.mlp.experts", H, H, 4 * E)
    only = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    with (
        opened(write(tmp_path / "new", arrays, **only), base) as new,
        opened(
            write(tmp_path / "old", swapped(arrays), **only, peft_version="0.19.0"), base
        ) as old,
    ):
        name = "layers.0.mlp.experts.down"
        assert np.allclose(deltas(new)[name], deltas(old)[name], rtol=1e-12)
    with pytest.raises(BadCheckpoint, match=r"is square, and adapter_config.json does not say"):
        opened(write(tmp_path / "none", arrays, **only, peft_version=None), base)


# --- ranks and scales ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"r": 4, "lora_alpha": 8}, 2.0),  # alpha = 2r
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 8 / math.sqrt(4)),
        ({"r": 8, "rank_pattern": {"q_proj": 4}, "lora_alpha": 8}, 2.0),
        (
            {
                "r": 8,
                "rank_pattern": {r".*\.q_proj": 4},
                "alpha_pattern": {"0.self_attn.q_proj": 1},
            },
            0.25,
        ),
        ({"lora_alpha": 4, "alpha_pattern": {"layers.1.self_attn.q_proj": 9}}, 1.0),
        ({"lora_alpha": 4, "alpha_pattern": {r"^model\.layers\.(0|2)\..+q_proj$": 2}}, 0.5),
    ],
)
def test_scales(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    with opened(write(tmp_path, q_proj(), **config)) as adapter:
        (update,) = adapter.updates
        assert update.scale == scale


def test_ranks_may_be_mixed(tmp_path: Path) -> None:
    arrays = q_proj() | q_proj(1, r=1) | q_proj(2, r=64)
    ranks = {"layers.1.self_attn.q_proj": 1, "layers.2.self_attn.q_proj": 64}
    with opened(write(tmp_path, arrays, rank_pattern=ranks)) as adapter:
        assert [each.rank for each in adapter.updates] == [4, 1, 64]
        assert [each.scale for each in adapter.updates] == [6 / 4, 6.0, 6 / 64]


def test_a_rank_that_the_config_does_not_give(tmp_path: Path) -> None:
    with pytest.raises(
        BadCheckpoint, match=r"has rank 4, but adapter_config\.json gives it rank 8"
    ):
        opened(write(tmp_path, q_proj(), r=8))
    doubled = {"rank_pattern": {r".*\.gate_up_proj": 8}}
    with pytest.raises(BadCheckpoint, match=r"rank 4, 6 experts.*, but .* gives it rank 8"):
        opened(write(tmp_path / "b", fused(), **FUSED, **doubled))


def test_an_expression_of_modules_that_could_run_for_ever_is_not_evaluated(tmp_path: Path) -> None:
    """Such as those that unsloth writes; a scale never depends on it."""
    for text in ("(a+)+$", r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)"):
        with opened(write(tmp_path, q_proj(), target_modules=text)) as adapter:
            (note,) = adapter.notes
            assert "does not evaluate the regular expression in target_modules" in note


# --- shared experts -----------------------------------------------------------------------------


def of_deepseek(shared: bool = False) -> Arrays:
    """Factors of all 8 routed experts of layer 1, of width 40, hidden 144."""
    arrays = linear("1.mlp.experts.base_layer", 80, 144, 8 * 8) | linear(
        "1.mlp.experts", 144, 40, 32
    )
    return arrays | (linear("1.mlp.shared_experts.gate_proj", 40, 144) if shared else {})


REMAPPED = {
    "target_modules": ["q_a_proj"],
    "target_parameters": ["gate_up_proj", "down_proj"],
    "rank_pattern": {r".*\.gate_up_proj": 8},
    "alpha_pattern": {r".*\.gate_up_proj": 12},
}


def test_shared_experts_are_read(tmp_path: Path) -> None:
    config = {**REMAPPED, "target_modules": []}
    config["target_parameters"] = [
        *REMAPPED["target_parameters"],
        "shared_experts.gate_proj.weight",
    ]
    with open_adapter(write(tmp_path, of_deepseek(shared=True), **config), deepseek()) as adapter:
        parts = {part.value for part in adapter.parts}
        assert parts == {"routed experts", "shared experts"} and not any(
            "shared" in n for n in adapter.notes
        )


def test_shared_experts_that_peft_mapped_to_routed_ones(tmp_path: Path) -> None:
    """The config of the user is there: it lists what the tensors are not."""
    config = {**REMAPPED, "target_modules": ["shared_experts.gate_proj"]}
    with pytest.raises(
        BadCheckpoint, match="peft maps shared experts to routed ones without warning"
    ):
        open_adapter(write(tmp_path, of_deepseek(), **config), deepseek())
    alone = {"target_modules": ["shared_experts.gate_proj"], "target_parameters": None}
    with pytest.raises(BadCheckpoint, match="peft maps shared experts to routed ones"):
        open_adapter(write(tmp_path / "b", of_deepseek(), **alone), deepseek())


def test_what_peft_left_out_is_said(tmp_path: Path) -> None:
    """peft's own config no longer says what was asked for; what it trained is exact."""
    arrays = of_deepseek() | linear("1.self_attn.q_a_proj", 40, 144)
    with open_adapter(write(tmp_path, arrays, **REMAPPED), deepseek()) as adapter:
        (note,) = adapter.notes
        assert "nothing was trained in shared experts and dense MLP" in note


# --- norms, dropout, other types ----------------------------------------------------------------


def test_norms_are_replaced(tmp_path: Path) -> None:
    gains = {
        f"{PREFIX}1.input_layernorm.weight": random(3, H),
        "base_model.model.model.norm.weight": random(4, H),
    }
    folder = write(tmp_path, q_proj() | gains, modules_to_save=["input_layernorm", "model.norm"])
    with opened(folder) as adapter:
        found = {gain.tensor.name: adapter.gain(gain) for gain in adapter.gains}
    assert {name: list(map(float, v)) for name, v in found.items()} == {
        "layers.1.attn_norm": list(map(float, gains[f"{PREFIX}1.input_layernorm.weight"])),
        "norm": list(map(float, gains["base_model.model.model.norm.weight"])),
    }


def test_the_head_that_peft_copies_is_not_read(tmp_path: Path) -> None:
    """With another number of tokens it is not the base's."""
    stem, config = "base_model.model.lm_head", {"target_modules": ["lm_head"]}
    factors = {f"{stem}.lora_A.weight": random(1, 4, H), f"{stem}.lora_B.weight": random(2, 99, 4)}
    made = write(
        tmp_path / "a", {**factors, f"{stem}.base_layer.weight": random(3, 99, H)}, **config
    )
    with open_adapter(made, model()) as adapter:
        (note,) = adapter.notes
        assert len(adapter.pairs) == 1 and "copy of its base's output head" in note
    made = write(
        tmp_path / "b", {**factors, f"{stem}.base_layer.weight": random(3, 100, H)}, **config
    )
    with pytest.raises(BadCheckpoint, match="does not read a whole output head"):
        open_adapter(made, model())


def test_dropout_has_no_effect(tmp_path: Path) -> None:
    with opened(write(tmp_path, fused(), **FUSED, lora_dropout=0.1)) as adapter:
        assert adapter.settings.dropout == 0.1 and len(adapter.updates) == 2


def test_bf16_and_f16_are_read_exactly(tmp_path: Path) -> None:
    arrays = {
        name: values.astype(np.float16).astype(np.float32) for name, values in q_proj().items()
    }
    folder = write(tmp_path, {})
    write_arrays(folder / "adapter_model.safetensors", arrays, "BF16")
    with opened(folder) as adapter:
        a, _ = adapter.factors(adapter.updates[0])
        assert adapter.pairs[0].dtype == "BF16"
        assert (a.view(np.uint32) & 0xFFFF == 0).all()


# --- kt-kernel's pair ---------------------------------------------------------------------------


def of_kt_kernel(folder: Path, **seals: Any) -> Path:
    """What kt-kernel writes: attention as peft does, experts stacked, and a manifest."""
    write(folder, q_proj(), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    arrays = {}
    for at, (kind, n, k) in enumerate((("gate", I, H), ("up", I, H), ("down", H, I))):
        arrays[f"layers.1.experts.{kind}_lora_a"] = random(2 * at, E, 4, k)
        arrays[f"layers.1.experts.{kind}_lora_b"] = random(2 * at + 1, E, n, 4)
    write_arrays(folder / "fused_expert_lora.safetensors", arrays, "BF16")
    artifacts = {}
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "fused_expert_lora.safetensors",
    ):
        data = (folder / name).read_bytes()
        artifacts[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    document = {
        "version": 1,
        "status": "ready",
        "lora": {"rank": 4, "alpha": 6.0},
        "artifacts": artifacts,
        **seals,
    }
    (folder / "kt_adapter_manifest.json").write_text(json.dumps(document))
    return folder


def test_the_pair_of_kt_kernel(tmp_path: Path) -> None:
    with opened(of_kt_kernel(tmp_path)) as adapter:
        found = updates(adapter)
        gate, up = found["layers.1.mlp.experts.gate_up"]
        assert gate.rows[:17].tolist() == [*range(16), 32] and up.rows[0] == 16
        a, b = adapter.factors(gate)
        assert a.shape == (E, 4, H) and b.shape == (E, I, 4) and gate.scale == 1.5
        want = random(0, E, 4, H)
        assert np.array_equal(a, (want.view(np.uint32) & 0xFFFF0000).view(np.float32))
        assert adapter.notes == ()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "fused_expert_lora.safetensors").unlink(), "which is missing"),
        (lambda f: append(f / "adapter_model.safetensors"), "has .* bytes, but"),
        (
            lambda f: flip(f / "fused_expert_lora.safetensors"),
            "the checksum of fused_expert_lora.safetensors differs",
        ),
        (lambda f: of_kt_kernel(f, status="writing"), "status is 'writing', not 'ready'"),
        (lambda f: of_kt_kernel(f, lora={"rank": 8}), "lora.rank is 8, but .* says 4"),
        (lambda f: of_kt_kernel(f, artifacts={"../x": {}}), "does not belong to an adapter"),
        (lambda f: of_kt_kernel(f, artifacts={}), "does not list fused_expert_lora"),
    ],
)
def test_a_pair_that_is_not_what_its_manifest_says(tmp_path: Path, spoil: Any, said: str) -> None:
    spoil(of_kt_kernel(tmp_path))
    with pytest.raises(BadCheckpoint, match=said):
        opened(tmp_path)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_two_adapters_that_differ_in_one_bit(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, q_proj())
    flip(tmp_path / "b" / "adapter_model.safetensors")
    with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b:
        assert a.digest != b.digest
    write(tmp_path / "b", q_proj())
    with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b:
        assert a.digest == b.digest
    write(tmp_path / "b", q_proj(), lora_alpha=CONFIG["lora_alpha"] + 1)
    with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b:
        assert a.digest != b.digest  # the scale counts


@pytest.mark.parametrize("size", [0, 1, 7, (1 << 16) - 1, (1 << 16) + 5, 3 << 16])
def test_bf16_is_rounded_to_nearest_even(size: int) -> None:
    """Whatever the blocks: against doubles, and where two are as near the even one."""
    values = random(size, size)
    values[::3] = (values[::3].view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)  # ties
    found = (as_bf16(values).astype(np.uint32) << 16).view(np.float32)
    below = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    above = ((values.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    off = [np.abs(each.astype(np.float64) - values) for each in (below, above)]
    even = (below.view(np.uint32) >> 16) % 2 == 0
    up = (off[1] < off[0]) | ((off[1] == off[0]) & ~even)
    assert np.array_equal(found, np.where(up, above, below))
