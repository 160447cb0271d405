"""Which weight files of a checkpoint a conversion needs when, and how many of them lie on the disk at a time.

A pure count over sizes. The files of a pack are made one after the other, each as a whole; a file of the checkpoint is
fetched for the first that needs it and dropped after the last. What is fetched ahead is bounded by the bytes that pack
and checkpoint may take together: those of the whole pack and of three files, or more if the pack cannot be made with
less. While little of the pack is written, much may be fetched ahead; so neither side waits for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ktcli.weights.conversion import Conversion

AT_ONCE = 3  # files of a checkpoint beside the whole pack


@dataclass(frozen=True, slots=True)
class Step:
    """One file of a pack, and the files of the checkpoint that it is made from."""

    name: str
    size_bytes: int
    needs: frozenset[str]


@dataclass(frozen=True)
class Schedule:
    """The steps of a conversion in their order.

    Attributes:
        sizes: the bytes of each file of the checkpoint.
        written_bytes: those of the pack that are there before the first step.
    """

    steps: tuple[Step, ...]
    sizes: Mapping[str, int]
    written_bytes: int = 0

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files of the checkpoint that are needed, in the order in which they are; others are never fetched."""
        return tuple(dict.fromkeys(file for step in self.steps for file in sorted(step.needs)))

    @cached_property
    def last_use(self) -> Mapping[str, int]:
        """The last step that needs each file."""
        return {file: i for i, step in enumerate(self.steps) for file in step.needs}

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that pack and checkpoint take together."""
        held = list(self._written)  # pack and checkpoint during each step
        for file in self.files:
            for i in range(self._first_use[file], self.last_use[file] + 1):
                held[i] += self.sizes[file]
        sizes = sorted((self.sizes[file] for file in self.files), reverse=True)
        whole = self.written_bytes + sum(step.size_bytes for step in self.steps)
        return max([whole + min(sum(sizes), AT_ONCE * max(sizes, default=0)), *held])

    def allowed(self, done: int) -> int:
        """The number of `files`, counted from the first, that may be on the disk or fetched after `done` steps.

        A file may come before its step if until then no step has more than `peak_bytes` on the disk.
        """
        held = list(self._written)
        for count, file in enumerate(self.files):
            for i in range(done, self.last_use[file] + 1):
                held[i] += self.sizes[file]
            until = self._first_use[file]
            if until > done and max(held[done : until + 1]) > self.peak_bytes:
                return count
        return len(self.files)

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
        total, found = self.written_bytes, []
        for step in self.steps:
            total += step.size_bytes
            found.append(total)
        return tuple(found)


def schedule(
    plan: Conversion,
    made: Collection[str],
    sizes: Mapping[str, int],
    also: Collection[str] = (),
) -> Schedule:
    """Returns the steps of a conversion that are left.

    Args:
        made: the files of the pack that are there.
        sizes: the bytes of each file of the checkpoint.
        also: files of the checkpoint that somebody wants to look at in any case.
    """
    left = [file for file in plan.ordered if file.name not in made]
    steps = [Step(file.name, file.size_bytes, plan.needs[file.name]) for file in left]
    if steps:  # whatever nobody needs comes last
        unseen = frozenset(also).difference(*(step.needs for step in steps))
        steps[-1] = replace(steps[-1], needs=steps[-1].needs | unseen)
    written = sum(file.size_bytes for file in plan.files if file.name in made)
    return Schedule(tuple(steps), sizes, written)
