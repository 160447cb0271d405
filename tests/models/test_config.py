"""A config is read in the hub's spelling and in transformers' own, and believed in neither."""

from __future__ import annotations

from typing import Any

import pytest
from reference import CASES, Case

from ktcli.errors import BadCheckpoint
from ktcli.models import build, model_types


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_spellings_give_the_same_model(case: Case) -> None:
    ours, hub = build(case.own_spelling()), build(case.hub_spelling())
    assert ours == hub
    assert ours.spec == hub.spec and ours.tensors == hub.tensors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tensor_has_one_name_and_a_layer_in_range(case: Case) -> None:
    model = build(case.own_spelling())
    names = [tensor.name for tensor in model.tensors]
    assert len(set(names)) == len(names)
    assert {t.layer for t in model.tensors} == {None, *range(model.spec.layers)}


BY_NAME = {case.name: case for case in CASES}
QWEN3, DEEPSEEK = BY_NAME["qwen3"], BY_NAME["deepseek-v3"]
HOSTILE: list[tuple[Case, dict[str, Any], str]] = [
    (QWEN3, {"hidden_size": -5}, "hidden_size is -5"),
    (QWEN3, {"hidden_size": 10**30}, "hidden_size is 1000"),
    (QWEN3, {"hidden_size": "80"}, "not a whole number"),
    (QWEN3, {"hidden_size": True}, "not a whole number"),
    (QWEN3, {"hidden_size": None}, "hidden_size is missing"),
    (QWEN3, {"num_hidden_layers": 2**31}, "num_hidden_layers"),
    (QWEN3, {"vocab_size": 0}, "vocab_size is 0"),
    (QWEN3, {"num_experts": 0, "num_local_experts": 0}, "num_experts"),
    (QWEN3, {"num_experts_per_tok": 11}, "11 of only 10"),
    (QWEN3, {"num_attention_heads": 3}, "not a multiple of 2"),
    (QWEN3, {"head_dim": 25}, "head_dim is 25"),
    (QWEN3, {"hidden_act": "gelu"}, "gelu"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN3, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (QWEN3, {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    (QWEN3, {"rope_parameters": [1, 2]}, "not a JSON object"),
    (QWEN3, {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
        "original_max",
    ),
    (QWEN3, {"rope_parameters": {"rope_type": ["yarn"]}}, "not a text"),
    (QWEN3, {"mlp_only_layers": 7}, "mlp_only_layers"),
    (QWEN3, {"mlp_only_layers": [7] * 2000}, "mlp_only_layers"),  # compared for every layer
    (
        QWEN3,
        {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096},
        "too wide",
    ),
    (DEEPSEEK, {"n_group": 5}, "not a multiple of 5"),
    (DEEPSEEK, {"topk_group": 9}, "topk_group"),
    (DEEPSEEK, {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
    (DEEPSEEK, {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15"),
    (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank"),
    (DEEPSEEK, {"n_shared_experts": 65}, "n_shared_experts"),
    (DEEPSEEK, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
]


@pytest.mark.parametrize(("case", "change", "said"), HOSTILE, ids=lambda value: str(value)[:40])
def test_a_bad_config_is_one_sentence(case: Case, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadCheckpoint, match=said) as caught:
        build({**case.own_spelling(), **change})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "gpt2"}, {"model_type": ["x"]}, {"model_type": 3}]
)
def test_an_unknown_architecture_names_the_known_ones(config: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match="unknown architecture") as caught:
        build(config)
    assert all(name in caught.value.hint for name in model_types())
