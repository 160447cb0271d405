"""Adapters that are damaged, hostile or of another base: one sentence that names what is wrong, and nothing is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters.fake_adapter import (
    FUSED,
    PREFIX,
    E,
    H,
    deepseek,
    fused,
    linear,
    model,
    q_proj,
    random,
    write,
    write_arrays,
)

from ktcli.adapters.factors import F32
from ktcli.adapters.folder import open_adapter
from ktcli.adapters.measure import summarised
from ktcli.errors import BadCheckpoint, KtError, NotFound

LEAF = f"{PREFIX}0.self_attn.q_proj"
A, B = f"{LEAF}.lora_A.weight", f"{LEAF}.lora_B.weight"


def refused(folder: Path, said: str) -> KtError:
    """The error of reading an adapter: one sentence of a bounded length."""
    with pytest.raises(KtError, match=said) as caught:
        open_adapter(folder, model())
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 1000
    return caught.value


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 0}, r"r is 0, outside 1\.\.4096"),
        ({"r": 5000}, r"r is 5000, outside"),
        ({"r": True}, "r is True, not a whole number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, outside"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf, outside"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e.300, outside"),
        ({"lora_alpha": 4e9}, r"lora_alpha 4e\+09 with rank 4 is a scale of 1e\+09, outside"),
        ({"lora_alpha": "6"}, "lora_alpha is '6', not a number"),
        ({"lora_dropout": 2}, r"lora_dropout is 2, outside 0\.\.1"),
        ({"lora_dropout": float("nan")}, "lora_dropout is nan"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj is 0, outside"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*, not an object"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern: q_proj is nan"),
        ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern has the key .* a regular expression"),
        ({"rank_pattern": {".*a.*b.*c": 4}}, "rank_pattern has the key .* a regular expression"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has the key"),
        ({"rank_pattern": {"x" * 400: 4}}, "rank_pattern has a key of 400 characters"),
        ({"rank_pattern": {f"a{i}|b": 4 for i in range(40)}}, "40 keys that are regular expr"),
        ({"target_modules": "a" * 20_000}, "target_modules is .*, not a list of names"),
        ({"target_modules": [3]}, "target_modules is .*, not a list of names"),
        (
            {"target_modules": ["q_proj", "nowhere_proj"]},
            "'nowhere_proj', which the base model does not",
        ),
        ({"target_modules": ["k_proj"]}, "not one of the targets that adapter_config.json lists"),
        ({"target_modules": "model.layers.1..*"}, "not one of the targets"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but kt reads only LORA"),
        ({"peft_type": None}, "peft_type is 'None'"),
        ({"use_dora": True}, "use_dora is 'True', but kt does not read DoRA"),
        ({"bias": "all"}, "bias is 'all', but kt does not read trained biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trained or added tokens"),
        ({"layer_replication": [[0, 2]]}, "repeated layers"),
        ({"init_lora_weights": "pissa"}, "a changed base model"),
        ({"brand_new": 3}, "does not know the field 'brand_new', which is '3'"),
        ({"base_model_name_or_path": 7}, "base_model_name_or_path is 7, not a string"),
        ({"base_model_name_or_path": "a\nb"}, "not the name of a model"),
    ],
)
def test_configs(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    refused(write(tmp_path, q_proj(), **config), said)


def without(name: str) -> Callable[[dict[str, F32]], None]:
    def change(arrays: dict[str, F32]) -> None:
        del arrays[name]

    return change


def renamed(old: str, new: str) -> Callable[[dict[str, F32]], None]:
    def change(arrays: dict[str, F32]) -> None:
        for name in list(arrays):
            if old in name:
                arrays[name.replace(old, new)] = arrays.pop(name)

    return change


def shaped(name: str, *shape: int) -> Callable[[dict[str, F32]], None]:
    return lambda arrays: arrays.update({name: random(1, *shape)})


def added(name: str, *shape: int) -> Callable[[dict[str, F32]], None]:
    return lambda arrays: arrays.update({f"{PREFIX}{name}": random(1, *shape)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(B), "q_proj.lora_A.weight in adapter_model.safetensors has no matching lora_B"),
        (without(A), "has no matching lora_A"),
        (shaped(A, 4, 96), r"has the shape \[4, 96\], but the base model requires \[4, 80\]"),
        (shaped(B, 64, 4), r"has the shape \[64, 4\], but the base model requires \[96, 4\]"),
        (shaped(A, 8, H), "has the shape"),
        (shaped(A, 0, H), "has the shape"),
        (shaped(A, 4 * H), "has the shape"),
        (
            renamed("layers.0", "layers.9"),
            "'model.layers.9.self_attn.q_proj', which the base model",
        ),
        (renamed("q_proj", "q_porj"), "which the base model does not have"),
        (renamed("model.layers.0", "../../etc"), "which the base model does not have"),
        (renamed("model.layers", "/model.layers"), "which the base model does not have"),
        (renamed("q_proj", "base_layer.q_proj"), "which the base model does not have"),
        (renamed("q_proj", "q_proj.base_layer"), "which the base model does not have"),
        (added("0.self_attn.q_proj.lora_magnitude_vector.weight", 96), "kt does not read DoRA"),
        (added("0.self_attn.q_proj.bias", 96), "kt does not read biases"),
        (added("0.input_layernorm.weight", H), "is not in the list modules_to_save"),
        (added("0.self_attn.q_proj.weight", 96, H), "is not a LoRA factor or a norm"),
        (added("x.lora_embedding_A", 4, 99), "LoRA of embeddings"),
        (added("embed_tokens.weight", 99, H), "kt does not read embeddings"),
    ],
)
def test_tensors(tmp_path: Path, change: Callable[[dict[str, F32]], None], said: str) -> None:
    arrays = q_proj()
    change(arrays)
    refused(write(tmp_path, arrays), said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            shaped(f"{PREFIX}0.mlp.experts.lora_A.weight", 20, 40),
            r"requires \[6 r, 40\] and \[80, 6 r\]",
        ),
        (renamed("base_layer", "base_layer.base_layer"), "is nested 2 deep"),
        (renamed("experts.lora", "experts.base_layer.base_layer.lora"), "is nested 2 deep"),
        (renamed("experts.base_layer", "router"), "which the base model does not have"),
    ],
)
def test_tensors_of_experts(
    tmp_path: Path, change: Callable[[dict[str, F32]], None], said: str
) -> None:
    arrays = fused()
    change(arrays)
    refused(write(tmp_path, arrays, **FUSED), said)


def each(experts: range, r: Callable[[int], int] = lambda e: 4) -> dict[str, F32]:
    found: dict[str, F32] = {}
    for e in experts:
        found |= linear(f"0.mlp.experts.{e}.up_proj", 40, H, r(e))
    return found


def test_experts_of_their_own_must_all_be_there(tmp_path: Path) -> None:
    config = {"target_modules": ["up_proj"]}
    refused(write(tmp_path, each(range(1, E)), **config), r"experts\.0\.up_proj has no factors")
    refused(
        write(tmp_path, each(range(E + 1)), **config),
        "is an expert that the base lacks: the base has only 6",
    )
    several = each(range(E), lambda e: 4 + (e == 2))
    refused(write(tmp_path, several, **config), "rank 5, but .* has 4")
    alphas = {"experts.3.up_proj": 7}
    refused(
        write(tmp_path, each(range(E)), **config, alpha_pattern=alphas), "different values of alpha"
    )


def test_the_same_rows_twice(tmp_path: Path) -> None:
    both = fused(down=False) | each(range(E))
    config = {"target_modules": ["up_proj"], "target_parameters": ["experts.gate_up_proj"]}
    refused(write(tmp_path, both, **config), "has factors twice")


def test_another_base(tmp_path: Path) -> None:
    """Hidden size, layers, experts: both numbers are in the sentence."""
    folder = write(tmp_path, q_proj(2))
    for changed, said in (
        ({"hidden_size": 96}, r"\[4, 80\], but the base model requires \[4, 96\]"),
        ({"num_hidden_layers": 2}, r"layers\.2\.self_attn\.q_proj', which the base model does not"),
    ):
        with pytest.raises(BadCheckpoint, match=said):
            open_adapter(folder, model(**changed))
    experts = write(tmp_path / "experts", fused(), **FUSED)
    with pytest.raises(BadCheckpoint, match=r"\[24, 80\] .* requires \[5 r, 80\]"):
        open_adapter(experts, model(num_experts=5))
    with pytest.raises(BadCheckpoint, match="which the base model does not have"):
        open_adapter(folder, deepseek())


def test_what_no_training_gives(tmp_path: Path) -> None:
    for value in (np.nan, np.inf):
        arrays = q_proj()
        arrays[B][3, 1] = value
        with (
            open_adapter(write(tmp_path, arrays), model()) as adapter,
            pytest.raises(BadCheckpoint, match=r"q_proj\.lora_B\.weight in .* NaN or Inf"),
        ):
            summarised(adapter)


@pytest.mark.thorough
def test_many_small_tensors(tmp_path: Path) -> None:
    """10,200 tensors of a base that has their targets are 150 updates; ones that belong nowhere end at the first."""
    base = model(num_hidden_layers=50, num_experts=34)
    arrays = {}
    for layer in range(50):
        for e in range(34):
            for name, n, k in (("gate_proj", 40, H), ("up_proj", 40, H), ("down_proj", H, 40)):
                stem = f"{PREFIX}{layer}.mlp.experts.{e}.{name}"
                arrays[f"{stem}.lora_A.weight"] = np.zeros((1, k), np.float32)
                arrays[f"{stem}.lora_B.weight"] = np.zeros((n, 1), np.float32)
    names = ["gate_proj", "up_proj", "down_proj"]
    folder = write(tmp_path, arrays, r=1, target_modules=names)
    with open_adapter(folder, base) as adapter:
        assert len(adapter.pairs) == 150
    nowhere = {
        f"x.{i}.lora_{letter}.weight": np.zeros((1, 1), np.float32)
        for i in range(10_000)
        for letter in "AB"
    }
    refused(write(tmp_path, nowhere), "which the base model does not have")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is not a folder"):
        open_adapter(tmp_path / "none", model())
    refused(tmp_path, "contains no adapter_config.json")
    folder = write(tmp_path, q_proj())
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for data, said in (
        (b"", "has only 0 bytes"),
        (whole[:-4], "the data is truncated"),
        (whole + b"x", "followed by something else"),
        (b"\xff" * 64, "claims a header of"),
        (whole[:8] + b"[" * (len(whole) - 8), "is damaged"),
    ):
        weights.write_bytes(data)
        refused(folder, said)
    weights.unlink()
    refused(folder, "contains no adapter_model.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    error = refused(folder, "a pickle, which can run code")
    assert "safe_serialization=True" in error.hint
    (folder / "adapter_model.bin").unlink()
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(whole)
    weights.symlink_to(outside)
    refused(folder, "is outside the model folder")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"r": ' + b"[" * 100_000, b'{"r": 1' + b"0" * 5000 + b"}"]
)
def test_configs_that_are_not_json(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, q_proj())
    (tmp_path / "adapter_config.json").write_bytes(data)
    refused(tmp_path, "adapter_config.json")


def test_other_types(tmp_path: Path) -> None:
    folder = write(tmp_path, {})
    write_arrays(folder / "adapter_model.safetensors", q_proj(), "I32")
    refused(folder, "is stored as I32; kt reads adapters of F32, F16, BF16")


def test_an_adapter_of_nothing(tmp_path: Path) -> None:
    refused(write(tmp_path, {}, target_modules=[]), "has no tensors that change anything")


def test_files_of_kt_kernel(tmp_path: Path) -> None:
    folder = write(tmp_path, q_proj())
    path = folder / "fused_expert_lora.safetensors"
    for name, shape, said in (
        (
            "layers.0.experts.gate_lora_c",
            (E, 4, H),
            "is not a name that kt-kernel uses for a factor",
        ),
        ("layers.9.experts.gate_lora_a", (E, 4, H), "the base has no gate of experts in layer 9"),
        ("layers.0.experts.gate_lora_a", (E, 4, H), "lacks the other factor of its pair"),
    ):
        write_arrays(path, {name: random(0, *shape)})
        refused(folder, said)
    stem = "layers.0.experts.gate_lora_"
    write_arrays(path, {f"{stem}a": random(0, E + 1, 4, H), f"{stem}b": random(0, E, 40, 4)})
    refused(folder, r"has the shape \[7, 4, 80\], but the base model requires \[6, 4, 80\]")
    write_arrays(path, {f"{stem}a": random(0, E, 8, H), f"{stem}b": random(0, E, 40, 8)})
    refused(folder, "has rank 8, but adapter_config.json gives it rank 4")
