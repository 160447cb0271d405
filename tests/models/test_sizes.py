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

from ktcli.layers.tensors import Role
from ktcli.models import build
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe, stored_bytes

PUBLISHED = [name for name in catalog.names() if not catalog.get(name).builtin]
# Of each set of published models that differ in weights or context only, one.
SHAPES = {str((p.parameters, p.expert_parameters)): n for n in PUBLISHED if (p := catalog.get(n))}
MATRICES = (Role.DENSE, Role.KEPT)
BF16 = Recipe.named("bf16", "bf16")
CAUSAL = transformers.AutoModelForCausalLM


def reference(name: str) -> dict[Role, int]:
    """Elements by role, as transformers has them; matrices are under DENSE."""
    whole = catalog.get(name).config
    text: dict[str, Any] = dict(whole.get("text_config", whole))
    text.pop("quantization_config", None)
    if text["model_type"] == "kimi_k2":  # unknown to transformers under this name
        text["model_type"] = "deepseek_v3"
    built = transformers.AutoConfig.for_model(**text)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    kept = model.state_dict().keys()
    counted = dict.fromkeys((Role.EXPERTS, Role.TABLE, Role.VECTOR, Role.DENSE), 0)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if key in kept:
            counted[_role(key, value.ndim)] += prod(value.shape)
    return counted


def _role(key: str, ndim: int) -> Role:
    if "embed_tokens" in key:
        return Role.TABLE
    if ".experts." in key:
        return Role.EXPERTS if ndim == 3 else Role.VECTOR
    # ERNIE's correction lies as one row; the weights of a convolution, biases of positions and tables of experts are
    # kept in f32, as vectors are.
    rows = ("correction_bias", "conv1d", "position_bias", "tid2eid")
    vector = ndim == 1 or any(name in key for name in rows)
    return Role.VECTOR if vector else Role.DENSE


@pytest.mark.parametrize("name", SHAPES.values())
def test_elements_and_bytes_are_those_of_transformers(name: str) -> None:
    true, model = reference(name), build(catalog.get(name).config)
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
    assert stored(Role.DENSE) == 2 * sum(declared(model, (Role.DENSE,)).values())
    assert stored(Role.VECTOR) == 4 * true[Role.VECTOR]


# Families that the catalogue has no model of: what transformers makes of no config but this.
DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "granitemoe": {},
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
