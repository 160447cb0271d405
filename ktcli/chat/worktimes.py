"""Reports where the time of answers went: the work while prompts were read, and while answers were generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ktcli.engine.request import Stats
from ktcli.records import dataclass

Clocks = Sequence[tuple[str, int]]  # (operation, nanoseconds so far) pairs, see `Engine.operations`

# The operations of the table, by what they do for a person.
GROUPS = {
    "experts": ("experts", "route", "split", "carry"),
    "attention": ("gqa", "mla", "mqa", "choose"),
    "recurrent layers": ("conv", "delta", "scan", "lightning", "pooling"),
    "dense products": ("linear",),
    "norms and others": (
        "embed norm layer_norm rope temper swiglu gate add scale greatest".split()
        + "select summary spread mix collapse expand".split()
    ),
}
CHOOSING = "choosing tokens"
ELSEWHERE = "everything else"  # waiting and, with a GPU, what it computes
_ORDER = (*GROUPS, CHOOSING, ELSEWHERE)
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_BAR = 8  # characters
_LEAST_SHARE = 0.005  # of the time, below which a line says nothing


@dataclass(frozen=True, slots=True)
class Lap:
    """A stretch of time, split by what it was spent on.

    Attributes:
        parts: seconds by group; what is missing is `ELSEWHERE`.
    """

    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Clocks, after: Clocks, seconds: float, choosing_s: float) -> Lap:
        """Returns the seconds between two readings of an engine's clocks, split by groups of operations.

        Args:
            before, after: pairs (operation, nanoseconds so far).
            seconds: all of the time.
            choosing_s: the seconds of it that went into the choice of tokens.
        """
        parts = {CHOOSING: choosing_s}
        for (name, begin), (_, end) in zip(before, after, strict=True):
            group = _GROUP_OF.get(name, "norms and others")
            parts[group] = parts.get(group, 0.0) + (end - begin) / 1e9
        return cls(seconds, {group: spent for group, spent in parts.items() if spent > 0})

    def __add__(self, other: Lap) -> Lap:
        names = {**self.parts, **other.parts}
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        return Lap(self.seconds + other.seconds, parts)

    @property
    def rows(self) -> list[tuple[str, float]]:
        """Pairs (group of operations, seconds), in a fixed order of the groups; the last one is everything else."""
        rest = max(0.0, self.seconds - sum(self.parts.values()))
        known = {**self.parts, ELSEWHERE: rest}
        return [(name, known[name]) for name in _ORDER if name in known]


@dataclass(slots=True)
class ChatTotals:
    """The sums of the counts and times of a chat's answers, and what loading its models took.

    Attributes:
        answers: how many were made, as far as they came.
        tokens: those of the answers.
        prompt_tokens: those of the prompts, as far as they were read.
        reused_tokens: those of them that were in the cache.
        loading_s: the seconds that the model took to be loaded.
    """

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    loading_s: float = 0.0
    reading: Lap = field(default_factory=Lap)
    answering: Lap = field(default_factory=Lap)

    def add(self, stats: Stats, laps: tuple[Lap, Lap] | None) -> None:
        """Adds the counts and times of an answer to the totals.

        Args:
            laps: the times of reading its prompt and of generating it; None: it was stopped before its first token.
        """
        self.answers += 1
        self.tokens += stats.tokens
        self.prompt_tokens += stats.prompt_tokens
        self.reused_tokens += stats.reused_tokens
        reading, answering = laps or (Lap(stats.prompt_s), Lap(stats.eval_s))
        self.reading += reading
        self.answering += answering

    @property
    def lines(self) -> str:
        """The totals as lines of text for people: answers, tokens, cached tokens, and times."""
        rows = [
            ("all answers:", f"{self.answers}, {self.tokens} token(s)"),
            ("cached / prompts:", f"{self.reused_tokens} / {self.prompt_tokens} token(s)"),
        ]
        times = time_lines(self.reading, self.answering, self.loading_s)
        return "\n".join([*(f"{name:<22}{value}" for name, value in rows), times])


def time_lines(reading: Lap, answering: Lap, loading_s: float = 0.0) -> str:
    """Returns lines of text, of at most 40 columns, with the shares of loading, reading and answering in the whole
    time, and below the last two those of their parts, the longest first; parts below 0.5 % are left out.
    """
    whole = loading_s + reading.seconds + answering.seconds
    lines = [_line("loading", loading_s, whole)] if loading_s else []
    for name, lap in (("reading", reading), ("answering", answering)):
        lines.append(_line(name, lap.seconds, whole))
        rows = sorted(lap.rows, key=lambda row: -row[1])
        shown = [row for row in rows if whole and row[1] / whole >= _LEAST_SHARE]
        lines += [_line(f"  {part}", spent, whole) for part, spent in shown]
    return "\n".join(lines)


def _line(name: str, seconds: float, whole: float) -> str:
    share = min(1.0, seconds / whole) if whole else 0.0
    full = round(_BAR * share)
    return f"{name:<22}{_time(seconds):>8}  {'█' * full}{'░' * (_BAR - full)}"


def _time(seconds: float) -> str:
    if seconds >= 0.95:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"
