"""Computes when a conversion needs which bytes of a checkpoint's files, and the maximum that is on the disk at a
time.

A pure count over sizes. The files of a pack are made one after the other, each as a whole; a file of the checkpoint is
fetched for the first that needs it and dropped after the last. In between, where the disk can give up parts of a file
(`holes`), only what is still needed of it stays. What is fetched ahead is bounded by the bytes that pack and checkpoint
may take together: those of the whole pack and of three files, or more if the pack cannot be made with less. While
little of the pack is written, much may be fetched ahead; so neither side waits for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property

from ktcli.records import dataclass
from ktcli.weights.conversion import Conversion
from ktcli.weights.ranges import Ranges, total, union

AT_ONCE = 3  # files of a checkpoint beside the whole pack


@dataclass(frozen=True, slots=True)
class Step:
    """One file of a pack, and the byte ranges of the checkpoint's files that it is made from."""

    name: str
    size_bytes: int
    needs: Mapping[str, Ranges]


@dataclass(frozen=True)
class Shards:
    """The files of a checkpoint, and their bytes on the disk.

    Attributes:
        sizes: the bytes of each.
        punched: whether parts of a file can be given up.
        present: those that are on the disk before the first step; each is needed.
        cut: those of them that have given up parts already.
    """

    sizes: Mapping[str, int]
    punched: bool = False
    present: frozenset[str] = frozenset()
    cut: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Schedule:
    """The steps of a conversion in their order.

    Attributes:
        written_bytes: those of the pack that are there before the first step.
    """

    steps: tuple[Step, ...]
    source: Shards
    written_bytes: int = 0

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The names of the checkpoint's weight files that the conversion needs, in the order in which it first needs
        them."""
        return tuple(dict.fromkeys(file for step in self.steps for file in sorted(step.needs)))

    @cached_property
    def last_use(self) -> Mapping[str, int]:
        """For each weight file of the checkpoint, by its name, the index of the last step (one file of the pack each)
        that needs it."""
        return {file: i for i, step in enumerate(self.steps) for file in step.needs}

    def kept(self, file: str, done: int) -> Ranges:
        """Returns the byte ranges of a checkpoint file that are still needed after the first `done` steps (one file of
        the pack each)."""
        return self._kept[file][done]

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that the pack and the checkpoint's files may take together on the disk: the whole pack and
        AT_ONCE files as large as the largest (or all files, if these are smaller), or more if any step needs more."""
        held = list(self._written)  # pack and checkpoint during each step
        for file in self.files:
            since = 0 if file in self.source.present else self._first_use[file]
            self._hold(held, file, since)
        sizes = sorted((self.source.sizes[file] for file in self.files), reverse=True)
        whole = self.written_bytes + sum(step.size_bytes for step in self.steps)
        return max([whole + min(sum(sizes), AT_ONCE * max(sizes, default=0)), *held])

    def allowed(self, done: int) -> int:
        """Returns how many of `files`, counted from the first, may be downloaded or be on the disk after the first
        `done` steps.

        A file may be downloaded before the step that needs it if no step until then exceeds `peak_bytes`.
        """
        held = list(self._written)
        for file in self.source.present:
            self._hold(held, file, done)
        for count, file in enumerate(self.files):
            if file in self.source.present:
                continue
            self._hold(held, file, done)
            until = self._first_use[file]
            if until > done and max(held[done : until + 1]) > self.peak_bytes:
                return count
        return len(self.files)

    def _hold(self, held: list[int], file: str, since: int) -> None:
        """Adds to each step from `since` on the bytes that a file takes during it: all of it until it is opened, which
        is for the first step that needs it."""
        source = self.source
        for i in range(since, self.last_use[file] + 1):
            is_cut = file in source.cut or (source.punched and i > self._first_use[file])
            held[i] += total(self.kept(file, i)) if is_cut else source.sizes[file]

    @cached_property
    def _kept(self) -> Mapping[str, list[Ranges]]:
        """Of each file, the bytes that each step and those behind it need."""
        found: dict[str, list[Ranges]] = {file: [()] for file in self.files}
        for step in reversed(self.steps):
            for file, later in found.items():
                new = step.needs.get(file)
                later.append(union((*later[-1], *new)) if new else later[-1])
        return {file: later[::-1] for file, later in found.items()}

    @cached_property
    def _first_use(self) -> Mapping[str, int]:
        first: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            for file in step.needs:
                first.setdefault(file, i)
        return first

    @cached_property
    def _written(self) -> tuple[int, ...]:
        """The bytes of the pack during each step, with those of the step's own file."""
        written, found = self.written_bytes, []
        for step in self.steps:
            written += step.size_bytes
            found.append(written)
        return tuple(found)


def schedule(
    plan: Conversion, made: Collection[str], source: Shards, also: Collection[str] = ()
) -> Schedule:
    """Returns the schedule of the remaining steps of a conversion: the weight files still to write, each with the bytes
    of the checkpoint that it needs.

    Args:
        made: the names of the weight files of the pack that are already complete.
        source: the files of the checkpoint, with their sizes.
        also: files of the checkpoint that are downloaded even if no step needs them.
    """
    left = [file for file in plan.ordered if file.name not in made]
    steps = [Step(file.name, file.size_bytes, plan.needs[file.name]) for file in left]
    if steps:  # whatever nobody needs comes last
        unseen = frozenset(also).difference(*(step.needs for step in steps))
        steps[-1] = replace(steps[-1], needs={**steps[-1].needs, **dict.fromkeys(unseen, ())})
    written = sum(file.size_bytes for file in plan.files if file.name in made)
    return Schedule(tuple(steps), source, written)
