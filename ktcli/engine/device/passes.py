"""Divides a batch into passes over the model: which runs are computed together, and where their experts are.

As a rule the whole batch is one pass. Prompts that are long enough to have their experts brought to the device are a
pass of their own: that takes far longer than the step of the answers beside them, and defers nothing. And the CPU takes
only so many tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ktcli.native import Run
from ktcli.planner.memory import PREFILL_CHUNK
from ktcli.records import dataclass

# A run, or a piece of one, with its number in the batch.
Numbered = tuple[int, Run]


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """The rule by which long prompts are read.

    Attributes:
        threshold: the fewest tokens of a chunk whose experts come to the device; None: never.
        chunk: the most tokens of such a chunk.
        short: the most tokens of any other chunk; where the CPU has experts, PREFILL_CHUNK is all it takes.
    """

    threshold: int | None
    chunk: int
    short: int = PREFILL_CHUNK

    def streams(self, n_tokens: int) -> bool:
        """Returns whether the experts in main memory are copied to the device for a chunk of `n_tokens` prompt tokens,
        and not computed by the CPU.
        """
        return self.threshold is not None and n_tokens >= max(2, self.threshold)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest chunk of a prompt, whether its experts are copied to the device or not;
        memory is reserved for such a chunk.
        """
        return max(self.chunk, self.short)

    @property
    def most_tokens(self) -> int:
        """The greatest number of tokens that a step computes."""
        return self.longest if self.streams(self.chunk) else self.short

    def chunk_tokens(self, left: int) -> int:
        """Returns the number of tokens of a prompt's next chunk, which one step computes, when `left` tokens are still
        to be computed.
        """
        long = min(left, self.chunk)
        return long if self.streams(long) else min(left, self.short)


@dataclass(frozen=True, slots=True)
class Pass:
    """Runs that are computed together.

    Attributes:
        streamed: whether the experts in main memory come to the device.
    """

    runs: tuple[Numbered, ...]
    streamed: bool = False

    @property
    def single(self) -> bool:
        """Whether each run of the pass has exactly one token and is not a piece of a longer chunk of a prompt."""
        return all(is_single(run) for _, run in self.runs)


def passes(runs: Sequence[Run], rule: LongPrompts, most: int) -> list[Pass]:
    """Returns the runs of a batch grouped into passes, runs that are computed together, in the order in which the
    passes are to be computed; a run that is too long for one pass is cut.

    Args:
        rule: says which prompts have their experts copied to the device, in passes of their own.
        most: the most tokens of a pass without such copies.
    """
    numbered = list(enumerate(runs))
    prompts = [each for each in numbered if _is_prompt(each[1])]
    if not rule.streams(sum(run.ids.size for _, run in prompts)):
        return [Pass(tuple(some)) for some in _packed(numbered, most)]
    rest = [each for each in numbered if not _is_prompt(each[1])]
    answers = [Pass(tuple(some)) for some in _packed(rest, most)]
    return [*answers, *(Pass(tuple(some), True) for some in _packed(prompts, rule.chunk))]


def is_single(run: Run) -> bool:
    """Returns whether a run has exactly one token and is not a piece of a longer chunk of a prompt."""
    return run.ids.size == 1 and (run.chunk is None or run.chunk[1] == 1)


def _is_prompt(run: Run) -> bool:
    """Returns whether a run may be computed where nothing is deferred, in a pass for many tokens."""
    return run.ids.size > 1 and not run.defer


def _packed(runs: Iterable[Numbered], most: int) -> Iterator[list[Numbered]]:
    """Yields the runs in groups of at most `most` tokens; one that goes beyond is cut."""
    some: list[Numbered] = []
    room = most
    for number, run in runs:
        rest = run
        while rest.ids.size > room:
            if room:
                head, rest = _cut(rest, room)
                some.append((number, head))
            yield some
            some, room = [], most
        some.append((number, rest))
        room -= rest.ids.size
    if some:
        yield some


def _cut(run: Run, n: int) -> tuple[Run, Run]:
    """The first n tokens of a run, and the others, which go on from the state that the first leave."""
    chunk = run.chunk or (run.start, run.ids.size)
    head = run._replace(ids=run.ids[:n], first_output=min(run.first_output, n), chunk=chunk)
    after = max(0, run.first_output - n)
    tail = run._replace(
        ids=run.ids[n:], start=run.start + n, first_output=after, state=run.next_state, chunk=chunk
    )
    return head, tail
