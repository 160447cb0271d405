"""The metadata of a GGUF file, read with checks: single facts, facts of layers, and the scaling of the rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktcli.errors import BadCheckpoint
from ktcli.models.config import MAX_LAYERS, Fields
from ktcli.weights.header import TensorEntry

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # expert_gating_func
_GATINGS = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SQRT_SOFTPLUS: "sqrtsoftplus"}


class Metadata:
    """The metadata of a file, read with checks, by keys without the architecture's name.

    Attributes:
        entries: the tensors of the file.
        factors: the frequency factors of the rotary embedding, one per pair of columns, where the file has them
            (Llama 3.1).

    Raises:
        BadCheckpoint: a value is missing or of the wrong type.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        entries: Mapping[str, TensorEntry],
        factors: Sequence[float] = (),
    ) -> None:
        self.fields, self.entries, self.factors = Fields(values, where), entries, list(factors)
        self.architecture = self.fields.text("general.architecture", "")

    def has(self, key: str) -> bool:
        """Returns whether the metadata has a value for `key`, a metadata key without the name of the architecture in
        front."""
        return self._value(key) is not None

    def lists(self, key: str) -> bool:
        """Returns whether the value that the metadata has for `key` is a list."""
        return isinstance(self.fields.values.get(self._name(key)), list)

    def whole(self, key: str, default: int | None = None, high: int = 1 << 40) -> int:
        """Returns the integer that the metadata has for `key`, in 0..`high`; the default, if there is one, where the
        key is missing."""
        return self._of(key).whole(self._name(key), low=0, high=high, default=default)

    def most(self, key: str) -> int:
        """Returns the integer that the metadata has for `key`; where it is a list with a value for each layer, the
        largest of them."""
        listed = self.fields.values.get(self._name(key))
        return max(self.each(key, int)) if isinstance(listed, list) else self.whole(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the number that the metadata has for `key`, or the default, if there is one, rounded to 7 significant
        digits."""
        value = self._of(key).number(self._name(key), low=-1e30, high=1e30, default=default)
        return float(f"{value:.7g}")  # f32 in the file: 1e-06, not 9.999999974752427e-07

    def flag(self, key: str, default: bool) -> bool:
        """Returns the boolean that the metadata has for `key`, or the default where it is missing."""
        return self._of(key).flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        """Returns the string that the metadata has for `key`, or the default where it is missing."""
        return self._of(key).text(self._name(key), default)

    @property
    def layers(self) -> int:
        """The number of decoder layers; layers that only predict tokens further ahead (MTP), which kt does not run, are
        not counted."""
        every = self.whole("block_count", high=MAX_LAYERS)
        own = every - self.whole("nextn_predict_layers", 0, MAX_LAYERS)
        if own < 1:
            raise self.bad(
                f"{self._name('block_count')} is {every}, less nextn_predict_layers {every - own},"
                f" outside 1..{MAX_LAYERS}"
            )
        first = f"blk.{own}."
        plain = f"{first}attn_norm.weight" in self.entries
        return every if plain and f"{first}nextn.eh_proj.weight" not in self.entries else own

    def each(self, key: str, kind: type) -> list[Any]:
        """Returns one value of the type `kind` for each decoder layer: the first values of the list that the metadata
        has for `key`."""
        listed, layers = self.fields.values.get(self._name(key)), self.layers
        if not isinstance(listed, list) or len(listed) < layers:
            raise self.bad(f"{self._name(key)} is not a list of {layers} layers")
        if any(type(each) is not kind for each in listed):
            raise self.bad(f"{self._name(key)} is not a list of {kind.__name__}")
        return listed[:layers]

    def switches(self, key: str) -> list[int]:
        """Returns 0 or 1 for each layer, from the list of booleans or of 0 and 1 that the metadata has for `key`."""
        listed = self.fields.values.get(self._name(key))
        is_flags = isinstance(listed, list) and listed and type(listed[0]) is bool
        found = [int(each) for each in self.each(key, bool if is_flags else int)]
        if not {*found} <= {0, 1}:
            raise self.bad(f"{self._name(key)} has values other than 0 and 1")
        return found

    def gating(self, *known: int) -> int:
        """Returns the number of the router's scoring function: 1 softmax, 2 sigmoid, 4 sqrtsoftplus. It must be one of
        `known`, and is the first of these where the file does not say."""
        found = self.whole("expert_gating_func", known[0]) or known[0]
        if found not in known:
            words = " and ".join(f"{_GATINGS[each]} ({each})" for each in known)
            raise self.bad(f"expert_gating_func is {found}; kt supports only {words} here")
        return found

    def with_tensor(self, name: str) -> list[bool]:
        """Returns for each decoder layer whether the file has its weight called `name`, "blk.<layer>.<name>.weight"."""
        return [f"blk.{layer}.{name}.weight" in self.entries for layer in range(self.layers)]

    def bad(self, said: str) -> BadCheckpoint:
        """Returns a `BadCheckpoint` whose message is the name of the file and `said`, what is wrong in it; the caller
        raises it."""
        return BadCheckpoint(f"{self.fields.where}: {said}")

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _value(self, key: str) -> Any:
        value = self.fields.values.get(self._name(key))
        if not isinstance(value, list) or not value:
            return value
        layers = self.fields.values.get(self._name("block_count"))
        further = self.fields.values.get(self._name("nextn_predict_layers"), 0)
        counts = (layers, further) if type(layers) is type(further) is int else (0, 0)
        if key != "block_count" and abs(len(value) - counts[0]) not in (0, counts[1]):
            raise self.bad(
                f"{self._name(key)} has {len(value)} values, "
                f"{self._name('block_count')} is {str(layers)[:40]}"
            )
        # One value per layer; layers of different widths are no model that kt knows.
        return value[0] if all(each == value[0] for each in value) else value

    def _of(self, key: str) -> Fields:
        return Fields({self._name(key): self._value(key)}, self.fields.where)


def scaling(m: Metadata) -> dict[str, Any] | None:
    """Returns the `rope_scaling` object of `config.json` (`rope_type`, `factor` …), which stretches the rotary
    embedding, from a GGUF file's metadata or frequency factors; None: it is not stretched."""
    if m.factors:
        return {"rope_type": "factors", "factors": m.factors}
    # A factor without a kind is a linear one, as in llama.cpp.
    kind = m.text("rope.scaling.type", "linear" if m.has("rope.scaling.factor") else "none")
    if kind == "none":
        return None
    found: dict[str, Any] = {"rope_type": kind}
    rows = {
        "factor": "factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    for name, key in rows.items():
        if m.has(f"rope.scaling.{key}"):
            found[name] = m.number(f"rope.scaling.{key}")
    original = "rope.scaling.original_context_length"
    if kind == "yarn":
        found["original_max_position_embeddings"] = m.whole(
            original if m.has(original) else "context_length"
        )
        multiplier = m.number("rope.scaling.yarn_log_multiplier", 0.0)
        if multiplier:  # stored as 0.1 * mscale_all_dim, of models whose mscale is the same
            found["mscale"] = found["mscale_all_dim"] = float(f"{10 * multiplier:.6g}")
    return found
