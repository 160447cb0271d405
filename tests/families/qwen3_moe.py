"""Qwen3-MoE, also beside vision and sound."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from families.case import COMMON, YARN, Case
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeForConditionalGeneration

_BASE = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 80,
    "deepstack_visual_indexes": [0],
}


def turn_experts(folder: Path) -> None:
    """The hub has these tensors of all experts as [E, in, out]; transformers reads them so, too."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


_INNER = "thinker.model.language_model."  # transformers' name of what the hub calls so
_SPOKEN = "thinker.model."


class _Thinker(Qwen3OmniMoeForConditionalGeneration):
    """The part of Qwen3-Omni that writes text, under the names of the whole."""

    @classmethod
    def from_pretrained(cls, folder: Path, **how: Any) -> Any:
        return super().from_pretrained(folder, key_mapping={f"^{_SPOKEN}": _INNER}, **how)

    def forward(self, ids: Any) -> Any:
        return self.thinker(ids)


def _name_as_the_hub(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = {}
    for name, value in load_file(path).items():
        apart = "visual" in name or "audio_tower" in name
        tensors[name.replace(_SPOKEN if apart else _INNER, "thinker." if apart else _SPOKEN)] = (
            value
        )
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True)
class _Omni(Case):
    @property
    def model_class(self) -> Any:
        return _Thinker

    def hub_spelling(self) -> dict[str, Any]:
        config = self.own_spelling()
        thinker = dict(config["thinker_config"])
        thinker["text_config"] = self._spell(thinker["text_config"])
        return {**config, "thinker_config": thinker}


_case = partial(Case, renamed={"num_local_experts": "num_experts"})

CASES = (
    _case("qwen3", "qwen3_moe", "Qwen3Moe", _BASE, seed=2, thorough=True),
    _case(
        "qwen3-yarn-bias-unnormalised",
        "qwen3_moe",
        "Qwen3Moe",
        {
            **_BASE,
            "rope_parameters": YARN,
            "attention_bias": True,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    _case(
        "qwen3-tied-dense-layer",
        "qwen3_moe",
        "Qwen3Moe",
        {**_BASE, "tie_word_embeddings": True, "mlp_only_layers": [1]},
        seed=1,
    ),
    Case(
        "qwen3-vl",
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        {
            "text_config": {
                **{name: value for name, value in _BASE.items() if name != "norm_topk_prob"},
                "moe_intermediate_size": 24,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
            },
            "vision_config": VISION,
            "tie_word_embeddings": False,
        },
        task="ForConditionalGeneration",
        publish=turn_experts,
        seed=4,
    ),
    _Omni(
        "qwen3-omni",
        "qwen3_omni_moe",
        "Qwen3OmniMoe",
        {
            "thinker_config": {
                "text_config": {
                    **_BASE,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4]},
                },
                "vision_config": VISION,
                "audio_config": {
                    "d_model": 16,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 16,
                    "output_dim": 80,
                },
            },
            "enable_audio_output": False,
        },
        publish=_name_as_the_hub,
        seed=1,
    ),
)
