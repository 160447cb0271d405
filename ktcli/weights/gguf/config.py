"""The metadata of a GGUF file as the hub's `config.json`: one row per fact.

Keys of the metadata begin with the architecture's name ("qwen3moe.block_count"). What they mean, and what a
file leaves out because llama.cpp knows it of the architecture, is from the specification of GGUF and from
llama.cpp's loaders; values are checked here for their type, by the family for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_HEADS, MAX_LAYERS, Fields
from ktcli.weights.gguf.names import Names
from ktcli.weights.gguf.types import Order, View, less_one, log_of_rate
from ktcli.weights.header import TensorEntry

# Field of `config.json` -> (key without the architecture, kind).
_Rows = Mapping[str, tuple[str, type]]

_COMMON: _Rows = {
    "hidden_size": ("embedding_length", int),
    "num_attention_heads": ("attention.head_count", int),
    "num_key_value_heads": ("attention.head_count_kv", int),
    "head_dim": ("attention.key_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "max_position_embeddings": ("context_length", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
    "rope_theta": ("rope.freq_base", float),
}
_EXPERTS: _Rows = {
    "num_experts_per_tok": ("expert_used_count", int),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
}
_DEEPSEEK: _Rows = {
    "n_routed_experts": ("expert_count", int),
    "n_shared_experts": ("expert_shared_count", int),
    "first_k_dense_replace": ("leading_dense_block_count", int),
    "routed_scaling_factor": ("expert_weights_scale", float),
    "norm_topk_prob": ("expert_weights_norm", bool),
    "n_group": ("expert_group_count", int),
    "topk_group": ("expert_group_used_count", int),
}
_OPTIONAL = ("q_lora_rank", "n_shared_experts", "sliding_window")  # parts of a model
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_GATINGS = {_SOFTMAX: "softmax", _SIGMOID: "sigmoid"}

Entries = Mapping[str, TensorEntry]
Changes = Callable[["Metadata", Entries], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The rules by which the files of one architecture are read.

    Attributes:
        model_type: the `model_type` of `config.json`.
        rows: facts beside the common ones.
        fixed: facts that hold for every file.
        scaling: fields of `rope_scaling` that hold for every file.
        changes: returns the facts that follow from several keys or from the tensors.
        by_layer: facts that `changes` reads because layers may differ in them.
        gating: how the family's router scores; a file that says otherwise is refused. 0: `changes` sees to it.
        names: tensor names that differ from the usual ones, see `names`.
        views: returns the views of the tensors that converters rearrange, by their names on the hub below the layer,
            from the config.
    """

    model_type: str
    rows: _Rows = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, Any] = field(default_factory=dict)
    changes: Changes = lambda metadata, entries: {}
    by_layer: tuple[str, ...] = ()
    gating: int = 0
    names: Names = field(default_factory=dict)
    views: Callable[[Fields], Mapping[str, View]] = lambda config: {}


class Metadata:
    """The metadata of a file, read with checks, by keys without the architecture's name.

    Attributes:
        factors: the frequency factors of the rotary embedding, one per pair of columns, where the file has them
            (Llama 3.1).

    Raises:
        BadCheckpoint: a value is missing or of the wrong type.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, factors: list[float] | None = None
    ) -> None:
        self.fields, self.factors = Fields(values, where), factors or []
        self.architecture = self.fields.text("general.architecture", "")

    def has(self, key: str) -> bool:
        return self._value(key) is not None

    def whole(self, key: str, default: int | None = None, high: int = 1 << 40) -> int:
        return self._of(key).whole(self._name(key), low=0, high=high, default=default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._of(key).number(self._name(key), low=-1e30, high=1e30, default=default)
        return float(f"{value:.7g}")  # f32 in the file: 1e-06, not 9.999999974752427e-07

    def flag(self, key: str, default: bool) -> bool:
        return self._of(key).flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        return self._of(key).text(self._name(key), default)

    @property
    def layers(self) -> int:
        """The number of layers without those that guess further tokens, which are not run."""
        extra = self.whole("nextn_predict_layers", 0, MAX_LAYERS)
        return self.whole("block_count", high=MAX_LAYERS) - extra

    def each(self, key: str, kind: type) -> list[Any]:
        """Returns one value of a kind for each layer, from a list."""
        listed, layers = self.fields.values.get(self._name(key)), self.layers
        if not isinstance(listed, list) or len(listed) < layers:
            raise BadCheckpoint(
                f"{self.fields.where}: {self._name(key)} is not a list of {layers} layers"
            )
        if any(type(each) is not kind for each in listed):
            raise BadCheckpoint(
                f"{self.fields.where}: {self._name(key)} is not a list of {kind.__name__}"
            )
        return listed[:layers]

    def gating(self, *known: int) -> int:
        """Returns how the router scores: one of `known`, the first where the file does not say."""
        found = self.whole("expert_gating_func", known[0]) or known[0]
        if found not in known:
            words = " and ".join(f"{_GATINGS[each]} ({each})" for each in known)
            raise BadCheckpoint(
                f"{self.fields.where}: expert_gating_func is {found}, kt computes {words} here"
            )
        return found

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _value(self, key: str) -> Any:
        value = self.fields.values.get(self._name(key))
        # One value per layer; layers of different widths are no model that kt knows.
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def _of(self, key: str) -> Fields:
        return Fields({self._name(key): self._value(key)}, self.fields.where)


def _llama(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Llama, Mistral and, with experts, Mixtral."""
    width = m.whole("rope.dimension_count", 0)
    given: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in entries}
    if width and not m.has("attention.key_length"):
        given["head_dim"] = width
    experts = m.whole("expert_count", 0)
    return given | ({"model_type": "mixtral", "num_local_experts": experts} if experts else {})


def _partly(m: Metadata) -> dict[str, Any]:
    """How much of a head is rotated."""
    width = m.whole("attention.key_length")
    return {"partial_rotary_factor": m.whole("rope.dimension_count", width) / max(width, 1)}


def _glm(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of GLM-4.5; the Air models have no norms of q and k."""
    return _partly(m) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in entries,
        "attention_bias": "blk.0.attn_q.bias" in entries,
    }


def _gpt_oss(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of gpt-oss. Published files stretch the context; the family assumes it where nothing is said."""
    plain = not m.has("rope.scaling.type")
    return {"rope_scaling": {"rope_type": "default"}} if plain else {}


def _deepseek(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of DeepSeek and Kimi-K2: V2 scores by softmax, V3 and Kimi-K2 by sigmoid. Files of today store the
    key and value widths of the latent form, and those of the heads as `_mla`."""
    gating = m.gating(_SOFTMAX, _SIGMOID)
    mla = "_mla" if m.has("attention.key_length_mla") else ""
    rope = m.whole("rope.dimension_count")
    heads = m.whole("attention.head_count")
    given: dict[str, Any] = {
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": m.whole(f"attention.key_length{mla}") - rope,
        "v_head_dim": m.whole(f"attention.value_length{mla}"),
        "num_key_value_heads": heads,
        "n_group": m.whole("expert_group_count", 1),
        "topk_group": m.whole("expert_group_used_count", 1),
    }
    if gating == _SOFTMAX:
        method = "group_limited_greedy" if given["n_group"] > 1 else "greedy"
        return given | {"model_type": "deepseek_v2", "topk_method": method}
    return given | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _delta(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Qwen3-Next and Qwen3.5. Files of the former have the projections of Qwen3.5, but for old ones."""
    heads = m.whole("ssm.time_step_rank", high=MAX_HEADS)
    given = _partly(m) | {"linear_value_head_dim": m.whole("ssm.inner_size") // max(heads, 1)}
    if m.has("attention.recurrent_layers"):
        kinds = ("full_attention", "linear_attention")
        given["layer_types"] = [kinds[each] for each in m.each("attention.recurrent_layers", bool)]
    old = any(name.endswith(".ssm_in.weight") for name in entries)
    return given | ({"model_type": "qwen3_next"} if old else {})


_ADDED_ONE = View(value=less_one)
_NORMS_LESS_ONE = {
    f"{name}.weight": _ADDED_ONE
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "model.norm",
    )
}


def _delta_heads(f: Fields) -> tuple[int, int, int, int]:
    """The numbers of key heads and of value heads for each, the columns of a value head, and the rows of q and k."""
    heads, keys = f.whole("linear_num_value_heads", high=MAX_HEADS), "linear_num_key_heads"
    key_heads = f.whole(keys, high=heads)
    f.require_multiple("linear_num_value_heads", heads, key_heads)
    width = 2 * key_heads * f.whole("linear_key_head_dim", high=4096)
    dim = f.whole("linear_value_head_dim", high=4096)
    f.require_width("width of linear attention", width + heads * dim)
    return key_heads, heads // key_heads, dim, width


def _next_views(f: Fields) -> dict[str, View]:
    """Of each key head, the rows of beta are before those of alpha."""
    keys, each, _, _ = _delta_heads(f)
    beta, alpha = (Order((keys, each), (2 * each, 1), first=first) for first in (0, each))
    return {
        **_NORMS_LESS_ONE,
        "linear_attn.A_log": View(value=log_of_rate),
        "linear_attn.in_proj_b.weight": View(beta),
        "linear_attn.in_proj_a.weight": View(alpha),
    }


def _tiled_views(f: Fields) -> dict[str, View]:
    """The first value heads of all key heads are before the second ones."""
    keys, each, dim, others = _delta_heads(f)

    def tiled(dim: int = 1, kept: int = 0) -> Order:
        return Order((keys, each, dim), (dim, keys * dim, 1), kept)

    return {
        **_NORMS_LESS_ONE,
        "linear_attn.in_proj_qkv.weight": View(tiled(dim, others)),
        "linear_attn.conv1d.weight": View(tiled(dim, others)),
        "linear_attn.in_proj_z.weight": View(tiled(dim)),
        "linear_attn.in_proj_b.weight": View(tiled()),
        "linear_attn.in_proj_a.weight": View(tiled()),
        "linear_attn.A_log": View(columns=tiled(), value=log_of_rate),
        "linear_attn.dt_bias": View(columns=tiled()),
        "linear_attn.out_proj.weight": View(columns=tiled(dim)),
    }


def _kinds(m: Metadata) -> dict[str, Any]:
    """The layers that have a window, where the file lists them or says every how many there is one without."""
    key, kinds = "attention.sliding_window_pattern", ("full_attention", "sliding_attention")
    if not m.has("attention.sliding_window") or not m.has(key):
        return {}
    return {"layer_types": [kinds[each] for each in m.each(key, bool)]}


def _types(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The layers that have experts, and those that have a window."""
    kinds = ("dense", "sparse")
    sparse = (f"blk.{i}.ffn_gate_inp.weight" in entries for i in range(m.layers))
    return _kinds(m) | {"mlp_layer_types": [kinds[each] for each in sparse]}


def _rotations(m: Metadata) -> dict[str, Any]:
    """The rotation of each kind of layers; only that of layers without a window is stretched."""
    width = max(m.whole("attention.key_length"), 1)
    theta = m.number("rope.freq_base", 10_000.0)
    full = {
        "rope_theta": theta,
        "partial_rotary_factor": m.whole("rope.dimension_count", width) / width,
        **(_scaling(m) or {}),
    }
    sliding = {
        "rope_theta": m.number("rope.freq_base_swa", theta),
        "partial_rotary_factor": m.whole("rope.dimension_count_swa", width) / width,
    }
    both = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": both, "rope_scaling": None}


def _mellum(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Mellum 2."""
    return _types(m, entries) | _rotations(m)


def _hunyuan(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Hunyuan-A13B, whose shared expert is as wide as the others."""
    return {"moe_intermediate_size": m.whole("expert_shared_feed_forward_length")}


def _granite(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Granite-MoE, some of which have a shared expert."""
    shared = m.has("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared"} if shared else {}


def _hy3(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Hy3, whose files say how wide all shared experts are together."""
    width = max(m.whole("expert_feed_forward_length"), 1)
    shared = m.whole("expert_shared_feed_forward_length", width)
    return _types(m, entries) | {"n_shared_experts": shared // width}


def _laguna(m: Metadata, entries: Entries) -> dict[str, Any]:
    """The facts of Laguna: of four layers with windows the first has none, and layers differ in heads."""
    heads = m.each("attention.head_count", int)
    given = _mellum(m, entries) | {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
    }
    if m.has("attention.sliding_window"):
        every = m.whole("attention.sliding_window_pattern", 4, MAX_LAYERS) or 1
        kinds = ("sliding_attention", "full_attention")
        given["layer_types"] = [kinds[i % every == 0] for i in range(m.layers)]
    return given


_BLOCK_SPARSE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_SHARED_EXPERT = {f"ffn_{p}_shexp": f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")}

_SHARED_WIDTH = {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)}
_DELTA: _Rows = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
    "linear_num_value_heads": ("ssm.time_step_rank", int),
    "full_attention_interval": ("full_attention_interval", int),
}
_DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **_SHARED_EXPERT,
}
_QWEN3_MOE: _Rows = {**_EXPERTS, "num_experts": ("expert_count", int)}
_QWEN_MOE: _Rows = {**_QWEN3_MOE, **_SHARED_WIDTH}

# The architectures by general.architecture.
ARCHITECTURES: dict[str, Architecture] = {
    # The rows of q and k are reordered so that the pairs that are rotated together are neighbours.
    "llama": Architecture(
        "llama",
        {"num_experts_per_tok": ("expert_used_count", int)},
        {"rope_interleave": True},
        changes=_llama,
        names=_BLOCK_SPARSE,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _QWEN_MOE,
        {"norm_topk_prob": False},
        names=_SHARED_EXPERT,
    ),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _QWEN3_MOE, {"norm_topk_prob": True}),
    "qwen3next": Architecture(
        "qwen3_5_moe_text",
        {**_QWEN_MOE, **_DELTA},
        changes=_delta,
        names={
            **_DELTA_NAMES,
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        },
        views=_next_views,
    ),
    "qwen35": Architecture(
        "qwen3_5_text", _DELTA, changes=_delta, names=_DELTA_NAMES, views=_tiled_views
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**_QWEN_MOE, **_DELTA},
        changes=_delta,
        names=_DELTA_NAMES,
        views=_tiled_views,
    ),
    # Text alone: the positions of pictures play no part.
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", _QWEN3_MOE, {"norm_topk_prob": True}, gating=_SOFTMAX),
    "olmoe": Architecture("olmoe", _QWEN3_MOE, {"norm_topk_prob": False}, gating=_SOFTMAX),
    "dots1": Architecture(
        "dots1",
        {**_EXPERTS, **_DEEPSEEK},
        {"sliding_window": None},
        changes=_types,
        gating=_SIGMOID,
    ),
    "hy_v3": Architecture(
        "hy_v3",
        {**_EXPERTS, **_DEEPSEEK},
        changes=_hy3,
        gating=_SIGMOID,
        names={
            "ffn_gate_inp": "mlp.router.gate",
            **dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.expert_bias"),
            **{f"ffn_{p}_shexp": f"mlp.shared_mlp.{p}_proj" for p in ("gate", "up", "down")},
        },
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {
            **_EXPERTS,
            "moe_num_experts": ("expert_count", int),
            "n_shared_experts": ("expert_shared_count", int),
            "moe_layer_start_index": ("leading_dense_block_count", int),
            "moe_layer_interval": ("interleave_moe_layer_step", int),
        },
        gating=_SOFTMAX,
        names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        _QWEN3_MOE,
        changes=_hunyuan,
        gating=_SOFTMAX,
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{p}_shexp": f"mlp.shared_mlp.{p}_proj" for p in ("gate", "up", "down")},
        },
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {
            "num_local_experts": ("expert_count", int),
            "num_experts_per_tok": ("expert_used_count", int),
            "shared_intermediate_size": ("expert_shared_feed_forward_length", int),
            "embedding_multiplier": ("embedding_scale", float),
            "attention_multiplier": ("attention.scale", float),
            "residual_multiplier": ("residual_scale", float),
            "logits_scaling": ("logit_scale", float),
        },
        {"rope_interleave": True},
        changes=_granite,
        gating=_SOFTMAX,
        names={
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **{
                f"ffn_{p}_exps": f"block_sparse_moe.experts.{{e}}.{p}_proj"
                for p in ("gate", "up", "down")
            },
            **{f"ffn_{p}_shexp": f"shared_mlp.{p}_proj" for p in ("gate", "up")},
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        {**_EXPERTS, **_DEEPSEEK, "sliding_window": ("attention.sliding_window", int)},
        changes=_types,
        gating=_SIGMOID,
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
    "afmoe": Architecture(
        "afmoe",
        {
            **_QWEN3_MOE,
            "n_shared_experts": ("expert_shared_count", int),
            "num_dense_layers": ("leading_dense_block_count", int),
            "route_norm": ("expert_weights_norm", bool),
            "route_scale": ("expert_weights_scale", float),
            "sliding_window": ("attention.sliding_window", int),
        },
        {"mup_enabled": True, "global_attn_every_n_layers": 4},
        gating=_SIGMOID,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
    "mellum": Architecture(
        "mellum",
        {**_QWEN3_MOE, "sliding_window": ("attention.sliding_window", int)},
        {"norm_topk_prob": True},
        changes=_mellum,
        gating=_SOFTMAX,
    ),
    "laguna": Architecture(
        "laguna",
        {
            **_QWEN_MOE,
            "moe_routed_scaling_factor": ("expert_weights_scale", float),
            "sliding_window": ("attention.sliding_window", int),
        },
        changes=_laguna,
        by_layer=("num_attention_heads",),
        gating=_SIGMOID,
        names={
            **_SHARED_EXPERT,
            "attn_gate": "self_attn.g_proj",
            "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
        },
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        {
            **_EXPERTS,
            **_DEEPSEEK,
            "q_lora_rank": ("attention.q_lora_rank", int),
            "kv_lora_rank": ("attention.kv_lora_rank", int),
        },
        {"rope_interleave": True},
        changes=_deepseek,
    ),
    "glm4moe": Architecture("glm4_moe", {**_EXPERTS, **_DEEPSEEK}, changes=_glm),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            "num_local_experts": ("expert_count", int),
            "num_experts_per_tok": ("expert_used_count", int),
            "intermediate_size": ("expert_feed_forward_length", int),
            "sliding_window": ("attention.sliding_window", int),
        },
        scaling={"truncate": False},
        changes=_gpt_oss,
        names={"ffn_gate_inp": "mlp.router"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {
            "num_local_experts": ("expert_count", int),
            "num_experts_per_tok": ("expert_used_count", int),
            "rotary_dim": ("rope.dimension_count", int),
        },
        names=_BLOCK_SPARSE,
    ),
}


def architecture_of(metadata: Metadata, known: tuple[str, ...]) -> Architecture:
    """Returns the rules for reading a file's architecture.

    Args:
        known: the model types that the families read.
    Raises:
        BadCheckpoint: there is none; the hint says what kt reads.
    """
    row = ARCHITECTURES.get(metadata.architecture)
    if row is None or row.model_type not in known:
        readable = sorted(name for name, each in ARCHITECTURES.items() if each.model_type in known)
        name = metadata.architecture[:60]
        raise BadCheckpoint(
            f"{metadata.fields.where} holds a model of the architecture {name!r}, which kt does not know",
            hint=f"of GGUF files kt reads the architectures {', '.join(readable)}",
        )
    return row


def config_of(m: Metadata, row: Architecture, entries: Entries) -> dict[str, Any]:
    """Returns the `config.json` that the model's makers would have written."""
    if row.gating:
        m.gating(row.gating)
    config: dict[str, Any] = {"model_type": row.model_type}
    read: dict[type, Callable[[str], Any]] = {
        int: m.whole,
        float: m.number,
        bool: lambda key: m.flag(key, False),
    }
    for name, (key, kind) in {**_COMMON, **row.rows}.items():
        if name in row.by_layer:
            continue
        if m.has(key):
            config[name] = read[kind](key)
        elif name in _COMMON or name in _OPTIONAL:  # a null is not filled in as an absent field is
            config[name] = None
    config["num_hidden_layers"] = m.layers
    embedding = entries.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadCheckpoint(f"{m.fields.where} has no token_embd.weight of rows and columns")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in entries
    scaling = _scaling(m)
    if scaling:
        config["rope_scaling"] = {**scaling, **row.scaling}
    return {**config, **row.fixed, **row.changes(m, entries)}


def _scaling(m: Metadata) -> dict[str, Any] | None:
    if m.factors:
        return {"rope_type": "factors", "factors": m.factors}
    kind = m.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    rows = {
        "factor": "factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    for name, key in rows.items():
        if m.has(f"rope.scaling.{key}"):
            scaling[name] = m.number(f"rope.scaling.{key}")
    original = "rope.scaling.original_context_length"
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = m.whole(
            original if m.has(original) else "context_length"
        )
        multiplier = m.number("rope.scaling.yarn_log_multiplier", 0.0)
        if multiplier:  # stored as 0.1 * mscale_all_dim, of models whose mscale is the same
            scaling["mscale"] = scaling["mscale_all_dim"] = float(f"{10 * multiplier:.6g}")
    return scaling
