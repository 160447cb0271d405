"""The shapes that `kt bench kernel` measures, as data: the experts of published and other models, and a row of work."""

from __future__ import annotations

from enum import Enum
from math import ceil

from ktcli.errors import UsageError
from ktcli.hardware.text import whole
from ktcli.records import dataclass

_MOST_COLUMNS, _MOST_EXPERTS = 1 << 16, 1 << 12  # bounds of a shape, far above any model


class Work(Enum):
    """The kinds of work that are measured."""

    DECODE = "decode"  # the experts of one token
    PREFILL = "prefill"  # the experts of many
    LINEAR = "linear"  # a dense product


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of the routed experts of one layer: H, I, E and K."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> LayerShape:
        """Returns the sizes of a layer's experts that `text` gives: a name from `SHAPES`, or four numbers H,I,E,K
        (hidden width, expert width, experts, experts per token).

        Raises:
            UsageError: the text is neither.
        """
        if text.upper() in SHAPES:
            return SHAPES[text.upper()]
        parts = text.split(",")
        numbers = [whole(part.strip()) for part in parts]
        if len(numbers) == 4 and None not in numbers:
            hidden, width, experts, top_k = (number or 0 for number in numbers)
            sizes = min(hidden, width) >= 1 and max(hidden, width) <= _MOST_COLUMNS
            if sizes and 1 <= top_k <= experts <= _MOST_EXPERTS:
                return cls(text, hidden, width, experts, top_k)
        raise UsageError(
            f"{text[:60]!r} is not a shape",
            hint=f"shapes: {', '.join(SHAPES)}, or H,I,E,K: 2048,768,128,8",
        )

    def tokens(self, per_expert: int) -> int:
        """Returns the number of tokens of a step in which every expert has `per_expert` tokens, rounded up to a whole
        number."""
        return ceil(per_expert * self.experts / self.top_k)


# Qwen3-30B-A3B, DeepSeek-V2-Lite, and DeepSeek-V3 with an eighth of its experts.
SHAPES = {
    "A": LayerShape("A", 2048, 768, 128, 8),
    "B": LayerShape("B", 2048, 1408, 64, 6),
    "C": LayerShape("C", 7168, 2048, 32, 8),
}


@dataclass(frozen=True, slots=True)
class LayerCase:
    """One case to measure: a kind of work with its number of tokens.

    Attributes:
        n_tokens: the tokens of a step.
        per_expert: the tokens of each expert; None for a dense product.
        read_bytes, ops: bytes read and operations of one layer in one step; a multiply and an add are two.
    """

    work: Work
    n_tokens: int
    per_expert: float | None
    read_bytes: int
    ops: int
