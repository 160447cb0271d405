"""Which tensors a GGUF file of a model holds, and in which number formats: lists, no bytes.

The shapes come from the same config that kt's own random engine is built from. Only the two
architectures that are measured are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Config = Mapping[str, Any]


class Part(Enum):
    """Decides a tensor's number format, as `ktcli.ops.tensors.Role` does for kt."""

    EXPERTS = "experts"
    DOWN = "down"  # the experts' down projection: some mixes give it more bits
    DENSE = "dense"
    VALUE = "value"  # the value projection: likewise
    HEAD = "head"
    KEPT = "kept"  # bf16: MLA's kv_b, and the embedding, of which only rows are read
    ROUTER = "router"  # f32, as the format's own converter writes it; kt has bf16
    NORM = "norm"  # f32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; `shape` is row-major, the inner dimension last (files state it the other way)."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None = None

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Mix:
    """Number formats of a file.

    Attributes:
        more: of the down projections and value projections in every second layer; None: as the rest.
    """

    experts: str
    dense: str
    head: str
    more: str | None = None

    def type_of(self, tensor: GgufTensor) -> str:
        """Name of the tensor's ggml type."""
        part = tensor.part
        if part in (Part.ROUTER, Part.NORM):
            return "F32"
        if part is Part.KEPT:
            return "BF16"
        if part is Part.HEAD:
            return self.head
        second = tensor.layer is not None and tensor.layer % 2 == 1
        if self.more and second and part in (Part.DOWN, Part.VALUE):
            return self.more
        return self.experts if part in (Part.EXPERTS, Part.DOWN) else self.dense


# Q4_0: dense parts and head in 8 bits, as kt has them beside 4-bit experts. Q4_K_M: the usual file,
# whose dense parts have 4.5 to 6.6 bits; half of its layers have more, here every second one.
MIXES = {
    "Q4_0": Mix("Q4_0", "Q8_0", "Q8_0"),
    "IQ4_XS": Mix("IQ4_XS", "Q8_0", "Q8_0"),
    "Q4_K_M": Mix("Q4_K", "Q4_K", "Q6_K", more="Q6_K"),
    "Q8_0": Mix("Q8_0", "Q8_0", "Q8_0"),
    "BF16": Mix("BF16", "BF16", "BF16"),
}

# Bytes of a block and weights in it.
BLOCKS = {
    "Q4_0": (18, 32),
    "Q8_0": (34, 32),
    "IQ4_XS": (136, 256),
    "Q4_K": (144, 256),
    "Q6_K": (210, 256),
    "BF16": (2, 1),
    "F32": (4, 1),
}


def size_bytes(tensor: GgufTensor, mix: Mix) -> int:
    """Bytes of the tensor's data."""
    block_bytes, block = BLOCKS[mix.type_of(tensor)]
    if tensor.shape[-1] % block:
        raise ValueError(f"{tensor.name}: rows of {tensor.shape[-1]} are no multiple of {block}")
    return tensor.elements // block * block_bytes


def expert_bits(config: Config, mix: Mix) -> float:
    """Bits per weight of the routed experts, over all layers."""
    found = [t for t in tensors(config) if t.part in (Part.EXPERTS, Part.DOWN)]
    return 8 * sum(size_bytes(t, mix) for t in found) / sum(t.elements for t in found)


def tensors(config: Config) -> list[GgufTensor]:
    """Every tensor of the model, in file order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    layer = {"qwen3_moe": _qwen_layer, "deepseek_v2": _deepseek_layer}[config["model_type"]]
    found = [GgufTensor("token_embd.weight", (vocab, hidden), Part.KEPT)]
    for index in range(config["num_hidden_layers"]):
        found += [
            GgufTensor(f"blk.{index}.{name}.weight", shape, part, index)
            for name, shape, part in layer(config, index)
        ]
    found.append(GgufTensor("output_norm.weight", (hidden,), Part.NORM))
    found.append(GgufTensor("output.weight", (vocab, hidden), Part.HEAD))
    return found


_Row = tuple[str, tuple[int, ...], Part]


def _qwen_layer(config: Config, index: int) -> Iterator[_Row]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "attn_norm", (hidden,), Part.NORM
    yield "attn_q", (queries, hidden), Part.DENSE
    yield "attn_k", (keys, hidden), Part.DENSE
    yield "attn_v", (keys, hidden), Part.VALUE
    yield "attn_q_norm", (head,), Part.NORM
    yield "attn_k_norm", (head,), Part.NORM
    yield "attn_output", (hidden, queries), Part.DENSE
    yield "ffn_norm", (hidden,), Part.NORM
    yield from _experts(config, config["num_experts"])


def _deepseek_layer(config: Config, index: int) -> Iterator[_Row]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    rank = config["kv_lora_rank"]
    yield "attn_norm", (hidden,), Part.NORM
    yield "attn_q", (heads * (nope + rope), hidden), Part.DENSE
    yield "attn_kv_a_mqa", (rank + rope, hidden), Part.DENSE
    yield "attn_kv_a_norm", (rank,), Part.NORM
    yield "attn_k_b", (heads, rank, nope), Part.KEPT
    yield "attn_v_b", (heads, value, rank), Part.KEPT
    yield "attn_output", (hidden, heads * value), Part.DENSE
    yield "ffn_norm", (hidden,), Part.NORM
    if index < config["first_k_dense_replace"]:
        yield from _mlp("", hidden, config["intermediate_size"])
        return
    yield from _experts(config, config["n_routed_experts"])
    yield from _mlp("_shexp", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])


def _experts(config: Config, count: int) -> Iterator[_Row]:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    yield "ffn_gate_inp", (count, hidden), Part.ROUTER
    yield "ffn_gate_exps", (count, width, hidden), Part.EXPERTS
    yield "ffn_up_exps", (count, width, hidden), Part.EXPERTS
    yield "ffn_down_exps", (count, hidden, width), Part.DOWN


def _mlp(suffix: str, hidden: int, width: int) -> Iterator[_Row]:
    yield f"ffn_gate{suffix}", (width, hidden), Part.DENSE
    yield f"ffn_up{suffix}", (width, hidden), Part.DENSE
    yield f"ffn_down{suffix}", (hidden, width), Part.DENSE


def metadata(config: Config) -> dict[str, Any]:
    """The architecture's keys; ints and floats are told apart by their Python type."""
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": 4096,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "vocab_size": config["vocab_size"],
    }
    if config["model_type"] == "qwen3_moe":
        return {
            **keys,
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "expert_count": config["num_experts"],
        }
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return {
        **keys,
        "attention.head_count_kv": 1,
        # The cache holds the latent; the keys and values of a head are made from it.
        "attention.key_length": config["kv_lora_rank"] + rope,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.q_lora_rank": 0,  # asked for unless the file has the layers of the whole model
        "rope.dimension_count": rope,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
    }


ARCHITECTURES = {"qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2"}
