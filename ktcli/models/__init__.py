"""Builds models from configs: one file for each family (see `Family`), listed here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from ktcli.errors import BadCheckpoint
from ktcli.models.config import Config, Defaults, Fields, completed, within_text
from ktcli.models.model import Model, Spec
from ktcli.models.pooling import read_pooling
from ktcli.unsupported import unsupported_type


class Family(Protocol):
    """The functions that each family file has."""

    # The model types that it builds, each with transformers' defaults of fields that a config may leave out,
    # see `completed`.
    MODEL_TYPES: Defaults

    def build(self, f: Fields) -> Model:
        """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
        weights.
        """

    def cut(self, f: Fields, layers: int) -> dict[str, Any]:
        """Returns a copy of the config `f` shortened to the model's first `layers` layers, see `models.cut`."""


# The family files, which are imported only when one of their model types is met: the keys of their MODEL_TYPES.
_FAMILIES = {
    "afmoe": "afmoe",
    "axk1": "axk1 AXK1",
    "axk2": "axk2",
    "bailing_hybrid": "bailing_hybrid",
    "bailing_moe": "bailing_moe bailing_moe_v2",
    "cohere2_moe": "cohere2_moe",
    "deepseek": "deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 kimi_k25",
    "deepseek_v32": "deepseek_v32 glm_moe_dsa",
    "deepseek_v4": "deepseek_v4",
    "dense": "llama mistral qwen2 qwen3 qwen3_vl",
    "ernie4_5_moe": "ernie4_5_moe ernie4_5_vl_moe ernie4_5_moe_vl",
    "exaone_moe": "exaone_moe",
    "gemma3": "gemma3 gemma3_text",
    "gemma4": "gemma4 gemma4_text",
    "glm4_moe": "glm4_moe glm4v_moe dots1 solar_open hy_v3",
    "glm5_next": "glm5_next",
    "gpt_oss": "gpt_oss",
    "granitemoe": "granitemoe granitemoeshared granitemoe_swa",
    "granitemoehybrid": "granitemoehybrid",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
    "kimi_linear": "kimi_linear",
    "laguna": "laguna",
    "lfm2_moe": "lfm2_moe",
    "llama4": "llama4 llama4_text",
    "mellum": "mellum",
    "mimo_v2_flash": "mimo_v2_flash",
    "minimax": "minimax minimax_m1 minimax_text_01",
    "minimax_m3": "minimax_m3_vl",
    "mistral4": "mistral4 mistral3",
    "mixtral": "mixtral minimax_m2",
    "nemotron_h": "nemotron_h",
    "olmoe": "olmoe flex_olmo",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe qwen3_vl_moe qwen3_omni_moe",
    "qwen3_next": "qwen3_next qwen3_5_moe qwen3_5_moe_text qwen3_5 qwen3_5_text",
    "step3p7": "step3p5 step3p7",
}
_FILE_OF = {kind: file for file, kinds in _FAMILIES.items() for kind in kinds.split()}

__all__ = ["Model", "Spec", "build", "cut", "families", "model_types", "with_defaults"]


def families() -> dict[str, tuple[str, ...]]:
    """Returns the `model_type` values that each family of models handles, by the name of its
    module in `ktcli.models`.
    """
    return {file: tuple(kinds.split()) for file, kinds in _FAMILIES.items()}


def model_types() -> tuple[str, ...]:
    """Returns every `model_type` that kt knows, in alphabetical order."""
    return tuple(sorted(_FILE_OF))


def build(config: Config) -> Model:
    """Returns the model that a parsed `config.json` describes: its layers and the tensors they need, without weights;
    an embedding model without its output head.

    Raises:
        BadCheckpoint: unknown architecture, or a field missing, of the wrong type or out of bounds.
    """
    family, whole = _read(config)
    model = family.build(Fields(whole))
    pooling = read_pooling(whole, model.spec.hidden)
    return model if pooling is None else model.pooled(pooling)


def with_defaults(config: Config) -> Config:
    """Returns a parsed `config.json` with transformers' defaults for its `model_type` in the fields that it leaves out.

    Raises:
        BadCheckpoint: unknown architecture.
    """
    return _read(config)[1]


def cut(config: Config, layers: int) -> dict[str, Any]:
    """Returns the `config.json` of the same model with only its first `layers` layers, at least one of which has routed
    experts if any layer of the model has.

    If the model begins with `layers` or more dense layers, fewer of them are kept.

    Raises:
        BadCheckpoint: unknown architecture, or a field that says what the layers are is missing or invalid.
    """
    family, whole = _read(config)
    return within_text(whole, lambda text: family.cut(Fields(text), layers))


def _read(config: Config) -> tuple[Family, Config]:
    """Returns the family of a config, and the config completed with the fields that it leaves out."""
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(kind, str) or kind not in _FILE_OF:
        from difflib import get_close_matches

        if (known := unsupported_type(str(kind))) is not None:
            raise BadCheckpoint(known.sentence, hint="kt plan lists models that run here")
        near = get_close_matches(str(kind)[:60], model_types(), n=1, cutoff=0.0)
        nearest = f"; the nearest name is {near[0]}" if kind else ""
        raise BadCheckpoint(
            f"unknown architecture: model_type is {str(kind)[:60]!r}",
            hint=f"this version knows {', '.join(model_types())}{nearest}",
        )
    family: Family = import_module(f"ktcli.models.{_FILE_OF[kind]}")
    return family, completed(config, family.MODEL_TYPES[kind])
