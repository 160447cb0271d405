"""Nemotron 3: Mamba-2, attention, experts and MLPs one by one, without gates; and experts in a latent space."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.case import COMMON, Case
from safetensors.torch import load_file, save_file

_VALUES = {
    **COMMON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "num_key_value_heads": 2,
    "head_dim": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "n_groups": 3,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "time_step_min": 1e-9,  # transformers bounds time steps by it in prefill alone
    "pad_token_id": None,
}  # fmt: skip


def _calm(folder: Path) -> None:
    """The output of Mamba-2 and of experts in a latent space is smaller, as in trained models."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("out_proj.weight", "fc2_latent_proj.weight")):
            tensors[name] /= 2
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True)
class _Pattern(Case):
    """The hub has a letter for each layer."""

    def _spell(self, config: dict[str, Any]) -> dict[str, Any]:
        pattern = self.config().hybrid_override_pattern
        del config["layers_block_type"]
        limits = [0.0, {"__float__": "Infinity"}]
        own = {"num_hidden_layers": len(pattern), "time_step_limit": limits}
        return {**config, **own, "hybrid_override_pattern": pattern}


CASES = (
    _Pattern(
        "nemotron-3-nano",
        "nemotron_h",
        "NemotronH",
        _VALUES,
        seed=5,
        router="mixer.gate",
        publish=_calm,
        thorough=True,
    ),
    # Experts in a latent space, a convolution without a bias, one group, no groups of experts.
    _Pattern(
        "nemotron-3-super",
        "nemotron_h",
        "NemotronH",
        {
            **_VALUES,
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "linear_attention", "moe"],
            "moe_latent_size": 48,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
        seed=2,
        router="mixer.gate",
        publish=_calm,
    ),
)  # fmt: skip
