"""What tests ask of a session beside what it offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from ktcli.engine import Engine, Session
from ktcli.engine.logits import Logits
from ktcli.native import Batch


def logits_of(session: Session, ids: Sequence[int], *, defer: int = 0) -> np.ndarray:
    """Appends ids; the logits of every one, [T, V]."""
    engine, sequence, found = session._engine, session.sequence, []
    rows = min(engine.max_tokens, engine.max_outputs)
    for start in range(0, len(ids), rows):
        part = np.array(ids[start : start + rows], dtype=np.int32)
        run = sequence.extend(part, first_output=0, defer=defer)
        found += [row.values.copy() for row in engine.run(Batch((run,)))]
        sequence.commit(run)
    return np.array(found)


def advance(session: Session, ids: Sequence[int]) -> tuple[Logits, int]:
    """Makes the timeline equal `ids`; the logits after the last, and the number of ids that were reused."""
    reused = session.sequence.adopt(ids)
    return session.feed(ids[reused:]), reused


@contextmanager
def interrupted(engine: Engine, step: int, *, computed: bool = False) -> Iterator[list[int]]:
    """The engine's steps from this one on are interrupted, before they run or after they were computed; yields the
    rows of the steps that were tried."""
    tried: list[int] = []
    run = engine.run

    def compute(batch: Batch) -> list[Logits]:
        tried.append(batch.rows)
        if len(tried) >= step:
            if computed:
                run(batch)
            raise KeyboardInterrupt
        return run(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "run", compute)
        yield tried
