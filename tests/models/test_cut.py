"""Cutting a model to its first layers."""

import pytest
from shapes import config

from ktcli.errors import BadCheckpoint
from ktcli.models import build, cut

NAMES = [
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3.2",
    "kimi-k2.5",
    "qwen3-30b-a3b",
    "qwen2-57b-a14b",
    "glm-4.5",
    "glm-5",
    "mixtral-8x7b",
    "gpt-oss-20b",
    "mimo-v2-flash",
    "ernie-4.5-21b-a3b",
    "glm-4.7-flash",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 20])
def test_a_cut_model_has_its_layers_and_at_least_one_with_experts(name: str, layers: int):
    spec = build(cut(config(name), layers)).spec
    assert spec.layers == layers
    assert spec.moe_layers >= 1


@pytest.mark.parametrize("name", NAMES)
def test_dense_layers_stay_where_there_is_room(name: str):
    whole = build(config(name)).spec
    dense = whole.layers - whole.moe_layers
    assert build(cut(config(name), dense + 2)).spec.moe_layers == 2


@pytest.mark.parametrize("name", NAMES)
def test_all_layers_cut_nothing(name: str):
    whole = build(config(name))
    assert build(cut(config(name), whole.spec.layers)).tensors == whole.tensors


def test_dense_layers_in_the_middle_are_cut_with_the_rest():
    mixed = config("qwen3-30b-a3b", num_hidden_layers=6, mlp_only_layers=[1, 3])
    assert build(cut(mixed, 4)).spec.moe_layers == 3  # the last of the four has experts again
    assert build(cut(mixed, 5)).spec.moe_layers == 3


@pytest.mark.parametrize("layers", range(1, 9))
@pytest.mark.parametrize("listed", [[1], [1, 3], [1, 3, 5, 7]])
def test_dense_layers_that_are_listed_where_every_other_is_dense(listed: list[int], layers: int):
    dense = config("qwen3-30b-a3b", decoder_sparse_step=2, mlp_only_layers=listed)
    spec = build(cut(dense, layers)).spec
    assert (spec.layers, spec.moe_layers >= 1) == (layers, True)


def test_experts_in_every_other_layer_only():
    assert build(cut(config("qwen3-30b-a3b", decoder_sparse_step=2), 1)).spec.moe_layers == 1


@pytest.mark.parametrize("layers", range(1, 7))
@pytest.mark.parametrize("start", range(4))
def test_experts_in_every_other_layer_from_one_on(start: int, layers: int):
    """ERNIE: where neither of the layers that would have experts is left, one of those left has them."""
    every_other = {"moe_layer_start_index": start, "moe_layer_interval": 2}
    spec = build(cut(config("ernie-4.5-21b-a3b", **every_other), layers)).spec
    assert (spec.layers, spec.moe_layers >= 1) == (layers, True)


def test_a_default_number_of_dense_layers_is_cut_too():
    """DeepSeek-V3 has three dense layers even where its config does not say so."""
    silent = config("deepseek-v3")
    del silent["first_k_dense_replace"]
    assert build(cut(silent, 2)).spec.moe_layers == 1


def test_a_model_of_dense_layers_alone_is_cut_to_dense_ones():
    """As GGUF files of LFM2 are."""
    dense = {
        "model_type": "lfm2_moe",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "num_hidden_layers": 4,
        "num_dense_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
    }
    assert build(dense).spec.moe_layers == 0
    spec = build(cut(dense, 3)).spec
    assert (spec.layers, spec.moe_layers) == (3, 0)


@pytest.mark.parametrize("wrong", [3, "all", [None], {"0": 1}])
@pytest.mark.parametrize("name", ["moe_layers", "no_rope_layers"])
def test_lists_of_layers_that_are_none_are_refused(name: str, wrong: object):
    llama = {"model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 256}
    with pytest.raises(BadCheckpoint):
        build(cut({**llama, name: wrong}, 2))
