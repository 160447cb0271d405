"""Small random checkpoints written by transformers, and its logits as the reference.

Weights are bf16 values, so that a bf16 pack holds them exactly; transformers runs on them in f32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from ktcli.layers.tensors import Role
from ktcli.models import build
from ktcli.weights.oracle import pack, unpack
from ktcli.weights.recipe import Recipe, format_of

F32Array = NDArray[np.float32]

# Awkward on purpose: no width is a multiple of a panel (16) or a step (64).
_COMMON = {"vocab_size": 99, "hidden_size": 80, "intermediate_size": 72, "num_attention_heads": 4}
_QWEN3 = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 40,
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
_DEEPSEEK = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
_YARN = {
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


CASES = (
    Case("qwen3", "qwen3_moe", "Qwen3Moe", _QWEN3, seed=2),
    Case(
        "qwen3-yarn-bias-unnormalised",
        "qwen3_moe",
        "Qwen3Moe",
        {**_QWEN3, "rope_parameters": _YARN, "attention_bias": True, "norm_topk_prob": False},
    ),
    Case(
        "qwen3-tied-dense-layer",
        "qwen3_moe",
        "Qwen3Moe",
        {**_QWEN3, "tie_word_embeddings": True, "mlp_only_layers": [1]},
        seed=1,
    ),
    Case(
        "deepseek-v3",
        "deepseek_v3",
        "DeepseekV3",
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2},
        seed=4,
    ),
    Case(
        "deepseek-v3-yarn-unnormalised",
        "deepseek_v3",
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
        seed=3,
    ),
    Case(
        "kimi-k2",
        "kimi_k2",
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {**_YARN, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    Case(
        "deepseek-v2",
        "deepseek_v2",
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_shared_experts": 2,
        },
    ),
    Case(
        "deepseek-v2-lite",
        "deepseek_v2",
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
)


def write_checkpoint(case: Case, folder: Path) -> Path:
    """A random checkpoint in the hub's on-disk names."""
    torch.manual_seed(case.seed)
    model = getattr(transformers, f"{case.cls}ForCausalLM")(case.config())
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "gate.weight")):
                value.normal_(0, 0.3)  # routers that decide, biases that matter
            else:  # a layer adds less than it reads, as in trained models
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj")) else 1.0
                value.normal_(0, scale * value.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    if case.model_type == "kimi_k2":
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"deepseek_v3"', '"kimi_k2"'))
    return folder


@dataclass(frozen=True)
class Judged:
    """What the reference says of one sequence.

    Attributes:
        logits: [T, vocab].
        chosen: per MoE layer the experts of each token, [T, top_k], sorted.
        margin: [T] smallest gap of choice scores between chosen and refused experts (and groups), over
            the layers.
    """

    logits: F32Array
    chosen: list[NDArray[np.int64]]
    margin: F32Array


def judge(case: Case, folder: Path, ids: list[int]) -> Judged:
    """Run transformers in f32 on the checkpoint."""
    cls = getattr(transformers, f"{case.cls}ForCausalLM")
    model = cls.from_pretrained(
        folder, config=case.config(), dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    seen: list[tuple[Any, Any]] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda m, _, out: seen.append((m, out)))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    margins = [_margin(module, out) for module, out in seen]
    chosen = [np.sort(out[2].numpy().reshape(len(ids), -1), axis=1) for _, out in seen]
    return Judged(logits.numpy(), chosen, np.min(margins, axis=0))


def _margin(module: Any, out: Any) -> F32Array:
    """[T] gap of choice scores between chosen and refused experts, and between groups."""
    logits, _, chosen = out
    logits = logits.reshape(-1, logits.shape[-1]).float()
    if hasattr(module, "e_score_correction_bias"):
        scores = logits.sigmoid() + module.e_score_correction_bias
    else:
        scores = logits.softmax(-1)
    sigmoid = hasattr(module, "e_score_correction_bias")
    n_group = getattr(module, "num_group", None) or 1
    group_gap = torch.full((scores.shape[0],), float("inf"))
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if n_group > 1:
        grouped = scores.reshape(scores.shape[0], n_group, -1)
        value = grouped.topk(2, -1).values.sum(-1) if sigmoid else grouped.max(-1).values
        ranked = value.sort(-1, descending=True)
        group_gap = ranked.values[:, module.topk_group - 1] - ranked.values[:, module.topk_group]
        best = torch.zeros_like(value, dtype=torch.bool).scatter(
            1, ranked.indices[:, : module.topk_group], True
        )
        allowed = best.unsqueeze(-1).expand_as(grouped).reshape(scores.shape)
    chosen = chosen.reshape(scores.shape[0], -1)
    lowest = scores.gather(1, chosen).min(1).values
    refused = scores.masked_fill(~allowed, float("-inf")).scatter(1, chosen, float("-inf"))
    gap = torch.minimum(lowest - refused.max(1).values, group_gap)
    return gap.numpy().astype(np.float32)


def requantised(folder: Path, out: Path, recipe: Recipe) -> Path:
    """The checkpoint with every weight replaced by what the recipe's formats make of it, as f32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for tensor in build(config).tensors:
        fmt = format_of(tensor, recipe)
        for index in (
            range(tensor.count) if fmt and tensor.role in (Role.EXPERTS, Role.DENSE) else ()
        ):
            for name in tensor.source_names(index):
                matrix = tensors[name].float().numpy()
                tensors[name] = torch.from_numpy(unpack(fmt, pack(fmt, matrix), *matrix.shape))
    out.mkdir()
    save_file(
        {name: value.float().contiguous() for name, value in tensors.items()},
        out / "model.safetensors",
    )
    (out / "config.json").write_text(json.dumps(config))
    return out
