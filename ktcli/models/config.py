"""Reading a model's `config.json` as hostile input, in the hub's spelling and in transformers' own.

Every number has a bound, so that no later code can be made to allocate by a config. A field is named in
the error, with its value and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.layers.rope import Llama3, Yarn, rotary
from ktcli.ops.table.rowwise import Rope

# Generous bounds: the largest public model (Kimi-K2) has hidden 7168, 61 layers, 384 experts, vocab 163840.
MAX_WIDTH = 1 << 18
MAX_LAYERS = 1024
MAX_EXPERTS = 8192
MAX_TOP_K = 64
MAX_HEADS = 4096
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 27
MAX_CHOSEN = 1 << 16  # positions or blocks that a token attends to: of kt_program_choose
MAX_APART = (
    1 << 14
)  # heads or groups whose rows are found one by one; the largest public model has 4,000


# What publishers call the same fact, transformers' usual name first.
_SPELLINGS = (
    ("max_position_embeddings", "model_max_length"),
    ("n_group", "num_expert_group"),
    ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("norm_topk_prob", "moe_renormalize"),
    ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token"),
    ("num_key_value_heads", "num_attention_groups"),
    ("routed_scaling_factor", "router_scaling_factor"),
    ("share_expert_dim", "share_expert_dims"),
)
_SPELLED = {names[0]: names for names in _SPELLINGS}
_ROPE = ("rope_parameters", "rope_scaling")  # where a null says as little as nothing
STRETCHED = ("yarn", "llama3")  # rotations that know how long the texts of the training were
TEXT = "text_config"  # the text model's part of a config of one that also sees


def completed(config: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what it leaves out as transformers' class has it; a null is not left out.

    Args:
        usual: value by field, those of the text model's part below `TEXT`.
    """
    made = dict(config)
    for name, value in usual.items():
        if name == TEXT and isinstance(config.get(TEXT), Mapping):
            made[TEXT] = completed(config[TEXT], value)
        elif name != TEXT and not _says(config, name):
            made[name] = value
    return made


def _says(config: Mapping[str, Any], name: str) -> bool:
    """The config has the field under one of its names."""
    if name in _ROPE:
        return any(config.get(each) is not None for each in _ROPE)
    return any(each in config for each in _SPELLED.get(name, (name,)))


class Fields:
    """Checked access to a JSON object, whose facts are found under each of their names.

    Raises:
        BadCheckpoint: a field is missing, of the wrong type or out of bounds.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise BadCheckpoint(f"{where} is not a JSON object")
        self.values, self.where = values, where

    def has(self, *names: str) -> bool:
        """One of the names is there and not null."""
        return any(self.values.get(name) is not None for name in _spelled(names))

    def whole(
        self, *names: str, low: int = 1, high: int = MAX_WIDTH, default: int | None = None
    ) -> int:
        """The first of `names` that is there, as an integer in low..high."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not a whole number")
        if not low <= value <= high:
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, outside {low}..{high}")
        return value

    def number(
        self, *names: str, low: float = 0.0, high: float = 1e9, default: float | None = None
    ) -> float:
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not a number")
        if not (low <= value <= high and math.isfinite(value)):
            raise BadCheckpoint(
                f"{self.where}: {name} is {_show(value)}, outside {low:g}..{high:g}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        _, value = self._first((name,), default)
        if not isinstance(value, bool):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        _, value = self._first((name,), default)
        if not isinstance(value, str):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not a text")
        return value

    def require_width(self, what: str, width: int) -> None:
        """Refuse a product of fields that is too wide to be a model's."""
        if width > MAX_WIDTH:
            raise BadCheckpoint(f"{self.where}: {what} of {width} is too wide (limit {MAX_WIDTH})")

    def require_few(self, what: str, each: int) -> None:
        """Refuse more of what every layer has, and each of which is a piece of its own, than a model has."""
        n_layers = self.whole("num_hidden_layers", high=MAX_LAYERS)
        if each * n_layers > MAX_APART:
            raise BadCheckpoint(
                f"{self.where}: {what} of {each} in {n_layers} layers is too much (limit {MAX_APART} in all)"
            )

    def require_multiple(self, what: str, value: int, divisor: int, of: str = "") -> None:
        """Refuse a value that does not divide evenly.

        Args:
            of: what the divisor is, where that is not plain.
        """
        if value % divisor:
            whose = f" ({of})" if of else ""
            raise BadCheckpoint(
                f"{self.where}: {what} is {value}, not a multiple of {divisor}{whose}"
            )

    def require(self, name: str, value: Any, *allowed: Any) -> None:
        """Refuse a value that this version does not compute."""
        if value not in allowed:
            known = ", ".join(_show(each, _plain) for each in allowed)
            raise BadCheckpoint(
                f"{self.where}: {name} {_show(value)} is not supported (known: {known})"
            )

    def only(self, known: Mapping[str, object]) -> None:
        """Refuse what this version does not compute: flags and texts that, where they are given, have one known value
        each."""
        for name, usual in known.items():
            if isinstance(usual, bool):
                self.require(name, self.flag(name, usual), usual)
            else:
                self.require(name, self.text(name, str(usual)), usual)

    def require_absent(self, name: str) -> None:
        """Refuse a field that changes what a model computes, which this version does not."""
        if self.has(name):
            raise BadCheckpoint(
                f"{self.where}: {name} is {_show(self.values[name])}; this version computes without"
            )

    def require_no_windows(self) -> None:
        """Refuse a list of layer types in which one attends through a window."""
        types = self.values.get("layer_types") or []
        if not isinstance(types, list) or any(each != "full_attention" for each in types):
            raise BadCheckpoint(
                f"{self.where}: layer_types has other than full_attention, which is not supported here"
            )

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """(name, value) of the first that is there."""
        known = _spelled(names)
        for name in known:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is None:
            raise BadCheckpoint(f"{self.where}: {' or '.join(known)} is missing or null")
        return names[0], default


def _spelled(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each with the others of the same fact."""
    return tuple(each for name in names for each in _SPELLED.get(name, (name,)))


def _plain(value: Any) -> str:
    """A text without quotes, if it is one that can stand in a sentence."""
    return value if isinstance(value, str) and value.isprintable() else repr(value)


def _show(value: Any, how: Callable[[Any], str] = repr) -> str:
    text = how(value)
    return text if len(text) <= 40 else text[:37] + "..."


def read_eps(f: Fields) -> float:
    """What every RMSNorm adds to the mean square."""
    return f.number("rms_norm_eps", high=1.0)


def read_rope(fields: Fields, dim: int, *, interleaved: bool) -> tuple[Rope, float]:
    """The rotation of `dim` columns, and DeepSeek's factor on the scores (1 without YaRN).

    Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (the hub), whose kind is
    called `rope_type` or `type`.
    """
    rope = _rope_fields(fields)
    source = rope if rope.has("rope_theta") else fields
    theta = source.number("rope_theta", low=1.0 + 1e-6, high=1e12, default=10_000.0)
    kind = rope_type(rope)
    rope.require("type", kind, "default", "linear", "yarn", "llama3", "factors", "dynamic")
    if kind == "dynamic":
        theta *= _read_stretch(rope, dim)
    if kind == "yarn":
        yarn = _read_yarn(rope, fields)
        return rotary(dim, theta, yarn=yarn, interleaved=interleaved), yarn.score_scale
    if kind == "llama3":
        return rotary(dim, theta, llama3=_read_llama3(rope, fields), interleaved=interleaved), 1.0
    if kind == "factors":
        factors = _read_factors(rope, dim // 2)
        return rotary(dim, theta, factors=factors, interleaved=interleaved), 1.0
    linear = rope.number("factor", low=1.0, high=1e4) if kind == "linear" else 1.0
    return rotary(dim, theta, linear=linear, interleaved=interleaved), 1.0


def rope_type(rope: Fields) -> str:
    """What a rotation is called, "default" where it has no name."""
    return rope.text("rope_type", rope.text("type", "default"))


def rotated_columns(fields: Fields, head_dim: int) -> int:
    """How many columns of a head are rotated: a part of them, or a number given outright."""
    rope = _rope_fields(fields)
    source = rope if rope.has("partial_rotary_factor") else fields
    part = source.number("partial_rotary_factor", high=1.0, default=1.0)
    dim = fields.whole("rotary_dim", high=head_dim, default=int(head_dim * part))
    fields.require_multiple("rotary_dim", dim, 2)
    return dim


def _read_stretch(rope: Fields, dim: int) -> float:
    """Hunyuan's factor on the base; without an alpha it would follow the length of the text."""
    rope.number("factor", low=1e-3, high=1e4)  # transformers wants one, which an alpha overrules
    if not rope.has("alpha") or dim < 4:
        raise BadCheckpoint(f"{rope.where}: a dynamic rotation of {dim} columns without alpha")
    return math.pow(rope.number("alpha", low=1e-3, high=1e9), dim / (dim - 2))


def _rope_fields(fields: Fields) -> Fields:
    nested = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    return Fields(nested, f"{fields.where}: rope")


def _read_factors(rope: Fields, count: int) -> list[float]:
    """What GGUF files give outright instead of how it was computed: one factor per pair of columns."""
    given = rope.values.get("factors")
    if not isinstance(given, list) or len(given) != count:
        raise BadCheckpoint(f"{rope.where}: factors are not a list of {count} numbers")
    return [Fields({"factors": each}, rope.where).number("factors", low=1e-6) for each in given]


def _read_llama3(rope: Fields, fields: Fields) -> Llama3:
    low = rope.number("low_freq_factor", low=1e-3, high=1e4)
    high = rope.number("high_freq_factor", low=1e-3, high=1e4)
    if high <= low:
        raise BadCheckpoint(
            f"{rope.where}: high_freq_factor is {high:g}, low_freq_factor {low:g}; it must be larger"
        )
    return Llama3(
        factor=rope.number("factor", low=1e-3, high=1e4),
        original_context=_original_context(rope, fields),
        low=low,
        high=high,
    )


def _original_context(rope: Fields, fields: Fields) -> int:
    """Positions of pre-training; where the config does not say, those the model was made for."""
    name, context = "original_max_position_embeddings", "max_position_embeddings"
    source = rope if rope.has(name) else fields
    return source.whole(name, context, high=MAX_CONTEXT)


def _read_yarn(rope: Fields, fields: Fields) -> Yarn:
    original = _original_context(rope, fields)
    explicit = rope.number("attention_factor", high=1e3) if rope.has("attention_factor") else None
    return Yarn(
        factor=rope.number("factor", low=1e-3, high=1e4),
        original_context=original,
        beta_fast=rope.number("beta_fast", low=1e-3, high=1e4, default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", low=1e-3, high=1e4, default=1.0) or 1.0,
        mscale=rope.number("mscale", high=100.0, default=0.0),
        mscale_all_dim=rope.number("mscale_all_dim", high=100.0, default=0.0),
        attention_factor=explicit,
        truncate=rope.flag("truncate", True),
    )
