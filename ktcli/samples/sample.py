"""The input of a trainer: ids, whether each is trained, and what was left out.

Pure data. Every sample is one document that sees only itself, so packing changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ktcli.errors import UsageError
from ktcli.records import dataclass

LEAST_CUTOFF = 2  # tokens: the second is the first that can be predicted
MIXES = ("concat", "interleave_under", "interleave_over")


class BadData(UsageError):
    """Raised when no sample can be made of something in a data file."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A document to learn.

    Attributes:
        ids: its tokens.
        trained: for each token whether it is trained; the first of a document never counts.
        where: the row it comes from, for people: "mine.jsonl, line 7".
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    where: str

    @property
    def trained_tokens(self) -> int:
        """The number of the sample's tokens that are trained; the first one does not count, as it is predicted from
        nothing.
        """
        return sum(self.trained[1:])


@dataclass(frozen=True, slots=True)
class DropCount:
    """The number of rows that were left out, or changed, for one reason.

    Attributes:
        reason: completes "N rows: …".
        first: the first of them, as in `Sample.where`.
    """

    reason: str
    rows: int
    first: str


class DropCounter:
    """Counts rows by the reason for which they are left out or changed, in the order of the first of each."""

    def __init__(self, begun: Iterable[DropCount] = ()) -> None:
        self._found = {each.reason: each for each in begun}

    def add(self, reason: str, where: str) -> None:
        """Counts a row that is left out or changed for this reason; `where` names the row, for people."""
        found = self._found.get(reason, DropCount(reason, 0, where))
        self._found[reason] = replace(found, rows=found.rows + 1)

    @property
    def counts(self) -> tuple[DropCount, ...]:
        """The number of rows that were left out or changed, for each reason, in the order in which the reasons first
        occurred.
        """
        return tuple(self._found.values())

    @property
    def sentence(self) -> str:
        """The reasons for which rows were left out or changed, with their numbers, as text for people; empty if there
        were none.
        """
        return "; ".join(
            f"{each.reason} ({each.rows:,}, first {each.first})" for each in self.counts
        )


@dataclass(frozen=True, slots=True)
class SampleSet:
    """The samples of some data files.

    Attributes:
        dropped: what was left out or cut, by reason.
        sha256: of the files' bytes, the chat template, and all settings that change the samples.
        rows: the rows that were read.
        notes: sentences on what a user might not expect of these samples.
    """

    samples: tuple[Sample, ...]
    dropped: tuple[DropCount, ...]
    sha256: str
    rows: int = 0
    notes: tuple[str, ...] = ()


def require_within(cutoff_len: int, context: int, model: str) -> None:
    """Raises UsageError if `cutoff_len`, the most tokens of a sample, is more than the context of the model of this
    name.
    """
    if cutoff_len > context:
        raise UsageError(
            f"cutoff_len {cutoff_len:,} is more than the {context:,} tokens of {model}",
            hint=f"use cutoff_len={context}",
        )


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """The settings that decide which tokens become samples, and which of them are trained.

    Attributes:
        cutoff_len: the most tokens of a sample; longer ones are cut at the end.
        max_samples: the most rows of each source, its first ones; None: all.
        mask_history: whether only the last answer of a conversation is trained.
        train_on_prompt: whether every token is trained.
        enable_thinking: as the switch of a chat; None: as the model likes.
        default_system: the system text of conversations that have none; None: none.
        mix_strategy: how the samples of several sources follow each other, one of MIXES.
        interleave_probs: the share of each source where they are interleaved; empty: in turns.
        seed: of what is drawn by chance: `num_samples` of a source, and shares.
    """

    cutoff_len: int = 2048
    max_samples: int | None = None
    mask_history: bool = False
    train_on_prompt: bool = False
    enable_thinking: bool | None = None
    default_system: str | None = None
    mix_strategy: str = "concat"
    interleave_probs: Sequence[float] = ()
    seed: int = 42

    def __post_init__(self) -> None:
        if self.cutoff_len < LEAST_CUTOFF:
            raise UsageError(
                f"cutoff_len is {self.cutoff_len}, but must be at least {LEAST_CUTOFF}",
                hint="2048 suits most conversations",
            )
        if self.max_samples is not None and self.max_samples < 1:
            raise UsageError(f"max_samples is {self.max_samples}, but must be at least 1")
        if self.mask_history and self.train_on_prompt:
            raise UsageError(
                "mask_history trains the last answer only, train_on_prompt every token",
                hint="remove one of the two",
            )
        if self.mix_strategy not in MIXES:
            raise UsageError(
                f"mix_strategy is {self.mix_strategy[:40]!r}, but must be {', '.join(MIXES[:-1])} or {MIXES[-1]}"
            )
