"""One configuration of one family, as transformers writes and judges it.

The cases of a family lie in the file of its name; widths are awkward on purpose: none is a multiple of a
panel (16) or a step (64).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = {"vocab_size": 99, "hidden_size": 80, "intermediate_size": 72, "num_attention_heads": 4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


# (router module, its inputs, router logits [T, E]) -> the scores that experts are chosen by, [T, E].
Choice = Callable[[Any, tuple[Any, ...], torch.Tensor], torch.Tensor]

# (router module, its logits [T, E], the chosen [T, K]) -> [T], in units of logits.
Edges = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


# What a router gives -> its logits [T, E] and the ids of the chosen [T, K].
Said = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]


def usual_said(out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, weights and ids."""
    return out[0], out[2]


def usual_choice(router: Any, _: tuple[Any, ...], logits: torch.Tensor) -> torch.Tensor:
    """Sigmoid and a correction where the router has one (DeepSeek-V3), else softmax."""
    correction = getattr(router, "e_score_correction_bias", None)
    return logits.softmax(-1) if correction is None else logits.sigmoid() + correction


@dataclass(frozen=True)
class Case:
    """One configuration of one family.

    Attributes:
        model_type: what the checkpoint's config says.
        cls: transformers' name of the family, "Qwen3Moe" → Qwen3MoeConfig, Qwen3MoeForCausalLM.
        task: end of the name of transformers' model.
        values: of transformers' config.
        seed: of the random weights. One router that changes its mind by rounding moves all later
            positions through the attention; these seeds are ones where few are so near a tie.
        hub: what the hub's config has besides transformers' own; None: the hub lacks the field.
        renamed: transformers' name of a field → the hub's.
        router: end of the name of the routers' modules.
        said: what their output says.
        choice: how they choose.
        edges: how far they are from where weights jump; None: no weight does.
        fast_error: rms error of the fast path's logits, of their spread, that is no fault: more where rounding
            decides which positions are attended to, and each is one of few.
        publish: turns the folder that transformers wrote into what the hub has, where they differ.
        thorough: every row of kernels and every format runs it: once for each kind of part.
        borrowed: transformers lacks the family, and another's class computes it: its defaults say nothing.
    """

    name: str
    model_type: str
    cls: str
    values: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    hub: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    router: str = "mlp.gate"
    said: Said = usual_said
    choice: Choice = usual_choice
    edges: Edges | None = None
    fast_error: float = 0.03
    publish: Callable[[Path], None] | None = None
    task: str = "ForCausalLM"
    thorough: bool = False
    borrowed: bool = False

    def config(self) -> Any:
        return getattr(transformers, f"{self.cls}Config")(**self.values)

    @property
    def model_class(self) -> Any:
        return getattr(transformers, f"{self.cls}{self.task}")

    def own_spelling(self) -> dict[str, Any]:
        """The config.json that transformers writes."""
        return {**self.config().to_dict(), "model_type": self.model_type}

    def hub_spelling(self) -> dict[str, Any]:
        """As the hub's repositories write it: rope_theta, rope_scaling with `type`, torch_dtype."""
        config = self.own_spelling()
        config |= {part: self._spell(config[part]) for part in ("text_config",) if part in config}
        return config if "text_config" in config else self._spell(config)

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        rope = dict(config.pop("rope_parameters"))
        if "rope_theta" in rope:  # else there are several, which `hub` spells
            config["rope_theta"] = rope.pop("rope_theta")
            if "partial_rotary_factor" in rope:
                config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            kind = rope.pop("rope_type")
            config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        config["torch_dtype"] = str(config.pop("dtype", "bfloat16"))
        config["eos_token_id"] = [1, 2]
        for own, hub in self.renamed.items():
            config[hub] = config.pop(own)
        config |= self.hub
        return {k: v for k, v in config.items() if v is not None or self.hub.get(k, "") is not None}


@dataclass(frozen=True)
class OwnRotations(Case):
    """The hub lists a rotation for each kind of layer, as transformers does, and has no other names."""

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        return config
