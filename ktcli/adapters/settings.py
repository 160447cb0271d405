"""Reads adapter_config.json as hostile input: which modules an adapter changes, with which ranks and scales.

What changes the computation in another way than B·A is refused by name; so is a field that this version does not know,
unless it is empty. What only says how the adapter was trained is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ktcli import smallfiles
from ktcli.adapters.patterns import Patterns, T
from ktcli.errors import BadCheckpoint
from ktcli.models.config import Fields
from ktcli.records import dataclass

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 32 << 20  # with a rank for each module of the largest model: 6 MB
MAX_RANK = 4096
MAX_SCALE = 1e6  # |alpha / r|; usual ones are 0.5 to 4, and f32 holds its products with any weight
LONGEST_NAME = 300
LONGEST_EXPRESSION = 10_000
MOST_NAMES = 100_000  # of modules in a list; the largest model has 45,000 with its experts
ALL_LINEAR = "all-linear"

# Fields that change the computation, each with the values that leave it as it is, and what it is called.
_NONE: tuple[Any, ...] = (None, False, {}, [], "")
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": (_NONE, "DoRA"),
    "bias": ((*_NONE, "none"), "trained biases"),
    "lora_bias": (_NONE, "biases of LoRA layers"),
    "fan_in_fan_out": (_NONE, "transposed layers (Conv1D)"),
    "layer_replication": (_NONE, "repeated layers"),
    "trainable_token_indices": (_NONE, "trained or added tokens"),
    "alora_invocation_tokens": (_NONE, "activated LoRA, which starts at certain tokens"),
    "use_qalora": (_NONE, "QA-LoRA"),
    "use_bdlora": (_NONE, "block-diagonal LoRA"),
    "arrow_config": (_NONE, "Arrow routing of several adapters"),
    "kasa_config": (_NONE, "KaSA"),
    "velora_config": (_NONE, "VeLoRA"),
    "monteclora_config": (_NONE, "MonteCLoRA"),
    "megatron_config": (_NONE, "Megatron's parallel layers"),
    # Other ways to begin leave the base other than it was published; saved as they are, they belong to that.
    "init_lora_weights": ((*_NONE, True, "gaussian", "eva", "orthogonal"), "a changed base model"),
}
_READ = frozenset(
    """
    peft_type base_model_name_or_path r lora_alpha use_rslora rank_pattern alpha_pattern target_modules
    target_parameters modules_to_save lora_dropout peft_version
    """.split()
)
_IGNORED = frozenset(
    """
    task_type auto_mapping revision inference_mode exclude_modules layers_to_transform layers_pattern megatron_core
    loftq_config eva_config corda_config lora_ga_config qalora_group_size ensure_weight_tying runtime_config
    base_model_class parent_library
    """.split()
)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The contents of adapter_config.json.

    Attributes:
        base: the base model as its author named it: org/repo, or a folder of theirs; "": nobody recorded it.
        rank, alpha: of modules that no pattern names.
        rslora: whether the scale is alpha / sqrt(r), not alpha / r.
        modules: the target modules, by the ends of their names; a text is a regular expression or "all-linear".
        parameters: the target parameters, by the ends of their names.
        saved: modules that are replaced as a whole.
        dropout: that of the training; without effect here.
        version: peft's version that wrote it; (): it does not say.
    """

    base: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Patterns[int]
    alphas: Patterns[float]
    modules: tuple[str, ...] | str
    parameters: tuple[str, ...]
    saved: tuple[str, ...]
    dropout: float
    version: tuple[int, ...]

    def rank_of(self, key: str) -> int:
        """Returns the LoRA rank of a module, by its name in peft: that of the first matching key of `rank_pattern`,
        else the general rank `r`.
        """
        return self.ranks.of(key) or self.rank

    def alpha_of(self, key: str) -> float:
        """Returns the LoRA alpha of a module, by its name in peft: that of the first matching key of `alpha_pattern`,
        else the general `lora_alpha`.
        """
        found = self.alphas.of(key)
        return self.alpha if found is None else found

    def scale_of(self, alpha: float, rank: int) -> float:
        """Returns the factor by which an update B·A is multiplied: alpha / rank, or with rsLoRA alpha / sqrt(rank).

        Raises:
            BadCheckpoint: the factor's magnitude is above MAX_SCALE.
        """
        scale = alpha / (math.sqrt(rank) if self.rslora else rank)
        if not abs(scale) <= MAX_SCALE:
            raise BadCheckpoint(
                f"{CONFIG}: lora_alpha {alpha:g} with rank {rank} is a scale of {scale:g}, outside ±{MAX_SCALE:g}"
            )
        return scale


def parse_settings(data: bytes) -> AdapterSettings:
    """Returns the settings (rank, alpha, targets …) in the contents of an adapter_config.json.

    Raises:
        BadCheckpoint: `data` is not JSON, a field has an invalid value, or the adapter is of a kind that kt does not
            read.
    """
    try:
        document = smallfiles.json_object(data)
    except ValueError as error:
        raise BadCheckpoint(f"{CONFIG} {error}") from None
    fields = Fields(document, CONFIG)
    _refuse_others(document)
    rank = fields.whole("r", high=MAX_RANK, default=8)
    return AdapterSettings(
        base=_name(fields, "base_model_name_or_path"),
        rank=rank,
        alpha=_alpha(fields, "lora_alpha", 8.0),
        rslora=fields.flag("use_rslora", False),
        ranks=_patterns(fields, "rank_pattern", _rank),
        alphas=_patterns(fields, "alpha_pattern", _alpha),
        modules=_modules(fields),
        parameters=_names(fields, "target_parameters"),
        saved=_names(fields, "modules_to_save"),
        dropout=fields.number("lora_dropout", high=1.0, default=0.0),
        version=_version(fields),
    )


def not_read(what: str) -> BadCheckpoint:
    """Returns an error with the message `what`, about something in an adapter that kt does not read; the hint is to
    merge the adapter with peft.
    """
    hint = "merge it into its base with peft (merge_and_unload), then: kt convert FOLDER"
    return BadCheckpoint(what, hint=hint)


def _refuse_others(document: Mapping[str, Any]) -> None:
    """Refuses everything that is more than B·A, by its name."""
    kind = document.get("peft_type")
    if kind != "LORA":
        raise not_read(f"{CONFIG}: peft_type is {str(kind)[:40]!r}, but kt reads only LORA")
    for field, (allowed, what) in _REFUSED.items():
        value = document.get(field)
        if not any(value is each or value == each for each in allowed):
            raise not_read(f"{CONFIG}: {field} is {str(value)[:60]!r}, but kt does not read {what}")
    known = _READ | _IGNORED | _REFUSED.keys()
    for field, value in document.items():
        if field not in known and value not in (*_NONE, 0):
            raise BadCheckpoint(
                f"{CONFIG}: this version of kt does not know the field {field[:60]!r}, which is {str(value)[:60]!r}",
                hint="if it has no effect on what the adapter computes, remove the field",
            )


def _patterns(fields: Fields, name: str, read: Callable[[Fields, str], T]) -> Patterns[T]:
    inner = Fields(_object(fields, name), f"{CONFIG}: {name}")
    return Patterns(inner.where, {key: read(inner, key) for key in inner.values})


def _rank(fields: Fields, name: str) -> int:
    return fields.whole(name, high=MAX_RANK)


def _alpha(fields: Fields, name: str, default: float | None = None) -> float:
    most = MAX_SCALE * MAX_RANK
    return fields.number(name, low=-most, high=most, default=default)


def _object(fields: Fields, name: str) -> Mapping[str, Any]:
    found = fields.values.get(name) or {}
    if not isinstance(found, Mapping):
        raise BadCheckpoint(f"{CONFIG}: {name} is {str(found)[:60]!r}, not an object")
    return found


def _modules(fields: Fields) -> tuple[str, ...] | str:
    value = fields.values.get("target_modules")
    if isinstance(value, str) and len(value) <= LONGEST_EXPRESSION:
        return value
    return _names(fields, "target_modules")


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of module names, which may be missing."""
    value = fields.values.get(name) or []
    sound = isinstance(value, list) and len(value) <= MOST_NAMES
    if not sound or not all(
        isinstance(each, str) and 0 < len(each) <= LONGEST_NAME for each in value
    ):
        raise BadCheckpoint(f"{CONFIG}: {name} is {str(value)[:60]!r}, not a list of names")
    return tuple(value)


def _name(fields: Fields, name: str) -> str:
    value = fields.text(name, "") if fields.has(name) else ""
    if len(value) > 4096 or not value.isprintable():
        raise BadCheckpoint(f"{CONFIG}: {name} is {value[:60]!r}, not the name of a model")
    return value


def _version(fields: Fields) -> tuple[int, ...]:
    """The numbers of peft's version; a development version counts as the one that it precedes."""
    words = str(fields.values.get("peft_version") or "").split(".")
    numbers = []
    for word in words[:3]:
        if not (word.isascii() and word.isdecimal() and len(word) < 6):
            break
        numbers.append(int(word))
    return tuple(numbers)
