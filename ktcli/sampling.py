"""The settings that determine the choice of the next token, as a model publishes them and a request overrides them."""

from __future__ import annotations

from dataclasses import replace

from ktcli.errors import UsageError
from ktcli.records import dataclass

# Setting → least, most, and both in words.
RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 (greedy) to 100"),
    "top_k": (0, 10_000_000, "0 (off) or more"),
    "top_p": (0.0, 1.0, "0 to 1 (off)"),
    "min_p": (0.0, 1.0, "0 (off) to 1"),
    "repetition_penalty": (0.01, 100.0, "0.01 to 100 (1 is off)"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2 (0 is off)"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2 (0 is off)"),
}
_MOST_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The settings by which the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 means greedy.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: keep the smallest set of best tokens with at least this probability; 1 keeps all.
        min_p: drop tokens below this fraction of the best token's probability; 0 keeps all.
        repetition_penalty: above 1, tokens of the prompt and the answer become less likely.
        seed: equal seeds give equal texts; None draws one.
        greedy: take the best token always; only penalties and bias still count.
        presence_penalty: taken off the logits of tokens that are in the answer.
        frequency_penalty: taken off them once for each time that they are.
        logit_bias: (id, number that is added to its logit, -100 to 100) pairs of different ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    greedy: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def used_temperature(self) -> float:
        """The temperature that sampling uses: 0 if `greedy` (the most likely token is always chosen), else
        `temperature`.
        """
        return 0.0 if self.greedy else self.temperature

    def __post_init__(self) -> None:
        for name, (low, high, words) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                said = str(value)[:30]
                raise UsageError(f"{name.replace('_', '-')} must be {words}, not {said}")
        for id, bias in self.logit_bias:
            if not 0 <= id < 2**31:
                raise UsageError(f"a logit bias names token {str(id)[:30]}, which does not exist")
            if not -_MOST_BIAS <= bias <= _MOST_BIAS:
                raise UsageError(f"the logit bias of token {id} must be -100 to 100, not {bias}")
        if len({id for id, _ in self.logit_bias}) < len(self.logit_bias):
            raise UsageError("a token has two logit biases")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"seed must be 0 to 2^64 - 1, not {str(self.seed)[:30]}")

    def require_within(self, vocab: int) -> None:
        """Raises an error if there are biases of tokens that a vocabulary of `vocab` ids does not have.

        Raises:
            UsageError: a biased token id is not in the vocabulary.
        """
        if bad := next((id for id, _ in self.logit_bias if id >= vocab), None):
            raise UsageError(
                f"a logit bias names token {bad}, which is outside the vocabulary of {vocab}"
            )

    def within(self, vocab: int) -> SamplingSettings:
        """Returns these settings without logit biases of tokens that a vocabulary of `vocab` ids does not have."""
        known = tuple((id, bias) for id, bias in self.logit_bias if id < vocab)
        return self if known == self.logit_bias else replace(self, logit_bias=known)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, by `greedy` or temperature 0, so that a
        seed has no effect.
        """
        return self.greedy or self.temperature == 0

    @property
    def counts(self) -> bool:
        """Whether a repetition, presence or frequency penalty is set, so that the choice depends on the tokens that
        came before.
        """
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
