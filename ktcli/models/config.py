"""Reads a model's `config.json` as hostile input, in the hub's spelling and in transformers' own.

Every number has a bound, so that no later code can be made to allocate by a config. A field is named in
the error, with its value and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ktcli.errors import BadCheckpoint

Config = Mapping[str, Any]
Defaults = Mapping[str, Config]  # of the fields that a config may leave out, by model type

# Generous bounds: the largest public model (Kimi-K2) has hidden 7168, 61 layers, 384 experts, vocab 163840.
MAX_WIDTH = 1 << 18
MAX_LAYERS = 1024
MAX_EXPERTS = 8192
MAX_TOP_K = 64
MAX_HEADS = 4096
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 27
MAX_CHOSEN = 1 << 16  # positions or blocks that a token attends to: of kt_program_choose
# Heads or groups whose rows are found one by one; the largest public model has 4,000.
MAX_APART = 1 << 14

# The names of one field among publishers, transformers' usual name first.
_SPELLINGS = (
    ("conv_kernel", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_n_heads"),
    ("max_position_embeddings", "model_max_length"),
    ("n_group", "num_expert_group"),
    ("n_groups", "mamba_n_groups"),
    ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("norm_topk_prob", "moe_renormalize"),
    (
        "num_experts_per_tok",
        "moe_k",
        "moe_topk",
        "moe_top_k",
        "num_experts_per_token",
        "top_k_experts",
    ),
    ("num_key_value_heads", "num_attention_groups"),
    ("routed_scaling_factor", "router_scaling_factor"),
    ("share_expert_dim", "share_expert_dims"),
    ("ssm_state_size", "mamba_d_state"),
    ("use_conv_bias", "mamba_conv_bias"),
)
_SPELLED = {names[0]: names for names in _SPELLINGS}
_ROPE = ("rope_parameters", "rope_scaling")  # where a null counts as absent
# A number without bound, as transformers writes it since version 5; JSON has no word for it.
INFINITE = {"__float__": "Infinity"}
# The parts of the text model in a vision-language model's config, and of a model that speaks, too, in which that is.
TEXT, THINKER = "text_config", "thinker_config"
_PARTS = (TEXT, THINKER)


def within_text(config: Config, change: Callable[[Config], dict[str, Any]]) -> dict[str, Any]:
    """Returns a copy of a `config.json` in which `change` is applied to the config of the text model; that is the
    nested one of a model with vision or speech, else the whole.
    """
    part = next((name for name in _PARTS if isinstance(config.get(name), Mapping)), None)
    return change(config) if part is None else {**config, part: within_text(config[part], change)}


def text_part(config: Config) -> Config:
    """Returns the config of the text model nested in a `config.json`, or the whole config where none is nested."""
    part = next((name for name in _PARTS if isinstance(config.get(name), Mapping)), None)
    return config if part is None else text_part(config[part])


def completed(config: Config, usual: Config) -> dict[str, Any]:
    """Returns a copy of a config with its missing fields set to the defaults `usual`; a null does not count as missing,
    except for rotary embeddings.

    Args:
        usual: default by field; those of a nested config, such as the text model's, are below its name, and not used if
            the config does not have it.
    """
    made = dict(config)
    for name, value in usual.items():
        if name in _PARTS and isinstance(config.get(name), Mapping):
            made[name] = completed(config[name], value)
        elif name not in _PARTS and not _says(config, name):
            made[name] = value
    return made


def _says(config: Config, name: str) -> bool:
    """Returns whether the config has the field under one of its names."""
    if name in _ROPE:
        return any(config.get(each) is not None for each in _ROPE)
    return any(each in config for each in _SPELLED.get(name, (name,)))


class Fields:
    """A JSON object with checked access to its fields; a field is found under each of its names.

    Raises:
        BadCheckpoint: a field is missing, of the wrong type or out of bounds.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise BadCheckpoint(f"{where} is not a JSON object")
        self.values, self.where = values, where

    @property
    def n_layers(self) -> int:
        """The number of decoder layers, the field `num_hidden_layers`; BadCheckpoint if it is
        missing or out of bounds.
        """
        return self.whole("num_hidden_layers", high=MAX_LAYERS)

    def has(self, *names: str) -> bool:
        """Returns whether the JSON object has a field of one of these names (or other spellings of them) that is not
        null.
        """
        return any(self.values.get(name) is not None for name in _spelled(names))

    def whole(
        self, *names: str, low: int = 1, high: int = MAX_WIDTH, default: int | None = None
    ) -> int:
        """Returns the value of the first field of `names` that is not null, or the default, as an integer in low..high;
        4.0 is 4.

        Raises:
            BadCheckpoint: there is no value, or it is not such an integer.
        """
        name, value = self._first(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not a whole number")
        if not low <= value <= high:
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, outside {low}..{high}")
        return value

    def number(
        self, *names: str, low: float = 0.0, high: float = 1e9, default: float | None = None
    ) -> float:
        """Returns the value of the first field of `names` that is not null, or the default, as a finite number in
        low..high.

        Raises:
            BadCheckpoint: there is no value, or it is not such a number.
        """
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not a number")
        if not (low <= value <= high and math.isfinite(value)):
            raise BadCheckpoint(
                f"{self.where}: {name} is {_show(value)}, outside {low:g}..{high:g}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Returns the boolean value of field `name`, or the default if it is missing or null.

        Raises:
            BadCheckpoint: the value is not true or false.
        """
        _, value = self._first((name,), default)
        if not isinstance(value, bool):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Returns the string in field `name`, or the default if it is missing or null.

        Raises:
            BadCheckpoint: the value is not a string.
        """
        _, value = self._first((name,), default)
        if not isinstance(value, str):
            raise BadCheckpoint(f"{self.where}: {name} is {_show(value)}, not a string")
        return value

    def require_width(self, what: str, width: int) -> None:
        """Raises BadCheckpoint if `width`, a product of fields, is larger than any model's (MAX_WIDTH)."""
        if width > MAX_WIDTH:
            raise BadCheckpoint(
                f"{self.where}: {what} is {width}, which is too wide (limit {MAX_WIDTH})"
            )

    def require_few(self, what: str, each: int) -> None:
        """Raises BadCheckpoint if `each`, a number of heads or groups in one layer, times the number of layers is
        larger than MAX_APART.
        """
        if each * self.n_layers > MAX_APART:
            raise BadCheckpoint(
                f"{self.where}: {what} is {each} in each of {self.n_layers} layers (limit {MAX_APART} in total)"
            )

    def require_multiple(self, what: str, value: int, divisor: int, of: str = "") -> None:
        """Raises BadCheckpoint if `value` is not a multiple of `divisor`.

        Args:
            of: name of the divisor, where the message would not be plain without it.
        """
        if value % divisor:
            whose = f" ({of})" if of else ""
            raise BadCheckpoint(
                f"{self.where}: {what} is {value}, not a multiple of {divisor}{whose}"
            )

    def require(self, name: str, value: Any, *allowed: Any) -> None:
        """Raises BadCheckpoint unless the value of field `name` is one of `allowed`, which this version computes."""
        if value not in allowed:
            known = ", ".join(_show(each, _plain) for each in allowed)
            raise BadCheckpoint(
                f"{self.where}: {name} {_show(value)} is not supported (known: {known})"
            )

    def only(self, known: Mapping[str, object]) -> None:
        """Raises BadCheckpoint if a field named in `known` has another value than the one given there, the only one
        that this version computes. Fields may be missing.
        """
        for name, usual in known.items():
            if isinstance(usual, bool):
                self.require(name, self.flag(name, usual), usual)
            elif isinstance(usual, int):
                self.require(name, self.whole(name, low=min(1, usual), default=usual), usual)
            else:
                self.require(name, self.text(name, str(usual)), usual)

    def require_absent(self, name: str) -> None:
        """Raises BadCheckpoint if the config has field `name` with a value that is not null: this version does not
        compute what it asks for.
        """
        if self.has(name):
            said, value = self._first((name,), None)
            raise BadCheckpoint(
                f"{self.where}: {said} is {_show(value)}; this version supports only models without it"
            )

    def require_no_windows(self) -> None:
        """Raises BadCheckpoint if the config's list `layer_types` has a value other than "full_attention", such as a
        sliding window.
        """
        types = self.values.get("layer_types") or []
        if not isinstance(types, list) or any(each != "full_attention" for each in types):
            raise BadCheckpoint(
                f"{self.where}: layer_types contains values other than full_attention, which is not supported here"
            )

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """Returns (name, value) of the first of `names` that is there."""
        known = _spelled(names)
        for name in known:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is None:
            raise BadCheckpoint(f"{self.where}: {' or '.join(known)} is missing or null")
        return names[0], default


def _spelled(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names, each with the other names of the same field."""
    return tuple(each for name in names for each in _SPELLED.get(name, (name,)))


def _plain(value: Any) -> str:
    """Returns a text without quotes, if it can stand in a sentence."""
    return value if isinstance(value, str) and value.isprintable() else repr(value)


def _show(value: Any, how: Callable[[Any], str] = repr) -> str:
    text = how(value)
    return text if len(text) <= 40 else text[:37] + "..."


def read_eps(f: Fields) -> float:
    """Returns the config's `rms_norm_eps`, the number that every RMSNorm adds to the mean square."""
    return f.number("rms_norm_eps", high=1.0)
