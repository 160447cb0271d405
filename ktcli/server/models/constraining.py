"""Compiles the constraints of answers during prefill: a request is submitted first, and its constraints follow.

The engine reads the prompt meanwhile, all but its last token, and goes on when they are there. What cannot be compiled
is refused before anything is sent to the client, unless `waiting.py` had to begin a stream that would have been silent
for too long: then the stream ends with the error. What is wrong with a schema as such (its size, its depth) is found
before, where the fields of a request are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ktcli.answers.grammar.compiler import (
    COMPILE_S,
    GrammarCompiler,
    GrammarConstraint,
    LateConstraint,
)
from ktcli.engine.constraint import Constraint
from ktcli.errors import UsageError

# For which a request waits, since what was compiled before is there at once: then its prompt is read in one go.
HEAD_START_S = 0.02


class Submitted(Protocol):
    """A request that an engine works on."""

    def cancel(self) -> None:
        """Cancels the request; the engine ends it at its next step."""


T = TypeVar("T", bound=Submitted)


async def submitted(
    grammars: GrammarCompiler,
    field: str,
    compile: Callable[[], Sequence[GrammarConstraint]],
    submit: Callable[[Sequence[Constraint]], T],
    count: int = 1,
) -> T:
    """Submits a request to an engine while its constraints are compiled; returns the submitted request once they are.

    Args:
        field: the request's field with the constraints, for errors.
        compile: returns the constraints, one for each of `count` answers; called on another thread.
        submit: submits the request with the constraints that it is given.
    Raises:
        UsageError: compiling takes too long or fails; the request is cancelled.
    """
    compiling = asyncio.ensure_future(_compiled(grammars, field, compile))
    made: T | None = None
    try:
        done, _ = await asyncio.wait({compiling}, timeout=HEAD_START_S)
        if done:
            return submit(compiling.result())
        late = [LateConstraint() for _ in range(count)]
        made = submit(late)
        for each, constraint in zip(late, await compiling, strict=True):
            each.become(constraint)
        return made
    except BaseException:
        if made is not None:
            made.cancel()
        raise
    finally:
        compiling.cancel()


async def _compiled(
    grammars: GrammarCompiler, field: str, compile: Callable[[], Sequence[GrammarConstraint]]
) -> Sequence[GrammarConstraint]:
    """Returns the compiled constraints; the time of the first reading of the vocabulary does not count."""
    await asyncio.wrap_future(grammars.prepare())
    try:
        return await asyncio.wait_for(asyncio.wrap_future(grammars.ask(compile)), COMPILE_S)
    except TimeoutError as error:
        raise UsageError(
            f"{field} takes more than {COMPILE_S:.0f} seconds to compile; use a simpler one"
        ) from error
