"""Records which fast methods fail on an engine's devices, so that the next engine need not try them again.

Triton's kernels come before torch's operations, launches that begin early before late ones, and captured steps before
steps that are launched anew. What fails here does so for these versions of everything and this model; whoever makes an
engine may keep it, and gives it to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Failures:
    """The faster ways that fail, each with the reason as a clause; "": it is not known to fail.

    Attributes:
        kernels: Triton's kernels.
        early: launches that begin before the one in front has ended.
        graphs: captured steps.
    """

    kernels: str = ""
    early: str = ""
    graphs: str = ""


@dataclass(frozen=True, slots=True)
class KnownFailures:
    """The faster ways that failed with earlier engines, and a function that stores what this one finds.

    Attributes:
        known: the ways that are not tried.
        found: the date of `known`, for people.
        keep: called with all that fail, once a step has run without what failed last.
    """

    known: Failures = Failures()
    found: str = ""
    keep: Callable[[Failures], object] = lambda _: None

    def sentences(self, failures: Failures, missing: str = "") -> Iterator[str]:
        """Yields the warnings for the user, one sentence each, about the faster methods in `failures` that the engine
        does without; none if nothing fails.

        Args:
            missing: what the system lacks for Triton's kernels, which is looked for at each start; "": nothing.
        """
        known = self.known
        if reason := failures.kernels or missing:
            said = f"the GPU runs plain torch operations, which are much slower: {reason}"
            yield said + self._since(reason == known.kernels)
        elif failures.early:
            said = "each kernel is launched only after the one before has finished"
            yield f"{said}: {failures.early}{self._since(failures.early == known.early)}"
        if failures.graphs:
            said = f"{failures.graphs}: every step is launched separately, which is slower"
            yield said + self._since(failures.graphs == known.graphs)

    def _since(self, known: bool) -> str:
        if not known:
            return ""
        return f" (found on {self.found}; after kt doctor --measure, the next start tries again)"


NONE_YET = KnownFailures()
