"""Sizes of published models are those of transformers' models of the same configuration, to the byte.

transformers builds them whole on the meta device, where tensors have shapes and no values.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import transformers
from declared import declared

from ktcli.models import Model, build
from ktcli.ops.tensors import Role
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe, stored_bytes

PUBLISHED = [name for name in catalog.names() if not catalog.get(name).builtin]
# Of each set of published models that differ in weights or context only, one.
SHAPES = {str((p.parameters, p.expert_parameters)): n for n in PUBLISHED if (p := catalog.get(n))}
# A second shape of a family, whose parts another one has shown, and one that takes a minute.
_REPEATED = {
    "deepseek-v4-pro", "glm-5.2", "minimax-m3", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "qwen3.6-27b", "trinity-nano",
}  # fmt: skip
CASES = [
    pytest.param(name, marks=[pytest.mark.thorough] if name in _REPEATED else [])
    for name in SHAPES.values()
]
MATRICES = (Role.DENSE, Role.KEPT)
BF16 = Recipe.named("bf16", "bf16")
CAUSAL = transformers.AutoModelForCausalLM


def reference(name: str) -> dict[Role, int]:
    """Elements by role, as transformers has them; matrices are under DENSE."""
    whole = catalog.get(name).config
    text: dict[str, Any] = dict(whole.get("text_config", whole))
    text.pop("quantization_config", None)
    text.setdefault("model_type", f"{whole['model_type']}_text")  # MiniMax-M3 leaves it out
    if text["model_type"] == "kimi_k2":  # unknown to transformers under this name
        text["model_type"] = "deepseek_v3"
    built = transformers.AutoConfig.for_model(**text)
    with torch.device("meta"):
        return _counted(transformers.AutoModelForCausalLM.from_config(built))


def _counted(model: Any) -> dict[Role, int]:
    """Elements of a model of transformers, without those for pictures."""
    kept = model.state_dict().keys()
    counted = dict.fromkeys((Role.EXPERTS, Role.TABLE, Role.VECTOR, Role.DENSE), 0)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if key in kept and ".visual." not in key:
            counted[_role(key, value.ndim)] += prod(value.shape)
    return counted


def _role(key: str, ndim: int) -> Role:
    if "embed_tokens" in key or "embeddings" in key:
        return Role.TABLE
    if ".experts." in key:
        return Role.EXPERTS if ndim == 3 else Role.VECTOR
    # ERNIE's correction lies as one row; the weights of a convolution, biases of positions and tables of experts are
    # kept in f32, as vectors are.
    rows = ("correction_bias", "conv1d", "position_bias", "tid2eid", "compress_ape")
    vector = ndim == 1 or any(name in key for name in rows)
    return Role.VECTOR if vector else Role.DENSE


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", CASES)
def test_elements_and_bytes_are_those_of_transformers(name: str) -> None:
    _check(reference(name), build(catalog.get(name).config))


def test_glm_with_the_defaults_of_its_configuration() -> None:
    """Not in the catalogue: published are windows of 4 positions, and of the rest not every value is known."""
    config = transformers.Glm5NextConfig()
    with torch.device("meta"):
        true = _counted(transformers.Glm5NextForConditionalGeneration(config))
    model = build(config.to_dict())
    _check(true, model)
    states = [state for state in model.spec.states if state.sequence_elements]
    assert len(states) == 45 and sum(state.position_elements > 0 for state in states) == 11
    linear, indexed = states[0], states[3]
    # Three rows of q, k and v, and 64 heads' [128, 128]; a window's keys so far, and the latent beside 16 keys of a
    # page, of which 4 are used.
    assert linear.sequence_elements == 3 * 3 * 64 * 128 + 64 * 128 * 128
    assert indexed.sequence_elements == 3 * 128
    assert indexed.position_elements == 512 + 16 * 128 // 64 and indexed.chosen == 2048


def _check(true: dict[Role, int], model: Model) -> None:
    assert sum(declared(model, (Role.EXPERTS,)).values()) == true[Role.EXPERTS]
    assert sum(declared(model, (Role.VECTOR,)).values()) == true[Role.VECTOR]
    matrices = declared(model, MATRICES)
    table = declared(model, (Role.TABLE,))
    assert sum(table.values()) == true[Role.TABLE]
    assert sum(matrices[key] for key in matrices.keys() - table.keys()) == true[Role.DENSE]

    def stored(*roles: Role) -> int:
        return sum(stored_bytes(tensor, BF16) for tensor in model.tensors if tensor.role in roles)

    # As the planner counts them; none of these widths needs padding. Vectors are kept in f32.
    assert stored(Role.EXPERTS) == 2 * true[Role.EXPERTS]
    assert stored(Role.TABLE) == 2 * true[Role.TABLE]
    dense = declared(model, (Role.DENSE,))
    split = dense.keys() & declared(model, (Role.KEPT,)).keys()  # of which some rows are kept
    kept = (t for t in model.tensors if t.role is Role.KEPT and t.sources[0][0].name in split)
    rows = sum(stored_bytes(tensor, BF16) for tensor in kept)
    assert stored(Role.DENSE) + rows == 2 * sum(dense.values())
    assert stored(Role.VECTOR) == 4 * true[Role.VECTOR]


# Families that the catalogue has no model of: what transformers makes of no config but this.
DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "axk1": {},
    "axk2": {},
    "bailing_hybrid": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "granitemoe_swa": {"shared_intermediate_size": 1024},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "laguna": {},
    "mellum": {},
    "step3p7": {"text_config": {}, "vision_config": {}},
}
SEES = ("vision", "multi_modal")


@pytest.mark.parametrize("kind", DEFAULTS)
def test_elements_of_a_default_config_are_those_of_transformers(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **DEFAULTS[kind])
    with torch.device("meta"):
        auto = transformers.AutoModelForImageTextToText if kind == "step3p7" else CAUSAL
        model = auto.from_config(config)
    kept = {k: v for k, v in model.state_dict().items() if not any(part in k for part in SEES)}
    built = build({**config.to_dict(), "model_type": kind})
    assert sum(declared(built).values()) == sum(prod(value.shape) for value in kept.values())
