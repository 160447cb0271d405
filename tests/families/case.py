"""One configuration of one family, as transformers writes and judges it.

The cases of a family lie in the file of its name; widths are awkward on purpose: none is a multiple of a
panel (16) or a step (64).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Case:
    """One configuration of one family.

    Attributes:
        model_type: what the checkpoint's config says.
        cls: transformers' name of the family, "Qwen3Moe" → Qwen3MoeConfig, Qwen3MoeForCausalLM.
        seed: of the random weights. One router that changes its mind by rounding moves all later
            positions through the attention; these seeds are ones where few are so near a tie.
    """

    name: str
    model_type: str
    cls: str
    values: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def config(self) -> Any:
        return getattr(transformers, f"{self.cls}Config")(**self.values)
