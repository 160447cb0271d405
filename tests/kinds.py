"""The kinds of layers: as few cases as together record everything that layers of any case do.

For tests that ask in which order things run, what is captured and what is the same on several devices, where another
case of the same kinds would show nothing new. Parity with transformers runs every case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise

from reference import CASES, Case
from tiers import cover

from ktcli.models import build
from ktcli.ops.recording import record


def recorded(case: Case) -> frozenset[tuple[object, ...]]:
    """The operations of a case's model with their facts, and which follows which, since neighbours are merged."""
    operations = [each.operation for each in record(build(case.own_spelling()).forward).records]
    names = [type(operation).__name__ for operation in operations]
    found = {fact for operation in operations for fact in facts(operation)}
    return frozenset(found | set(pairwise(names)))


def facts(of: object, *path: str) -> Iterator[tuple[object, ...]]:
    """Which kind each field has, of a switch its value; sizes are left out."""
    for each in fields(of):  # type: ignore[arg-type]
        value = getattr(of, each.name)
        at = (*path, type(of).__name__, each.name)
        yield (*at, str(value) if isinstance(value, bool | Enum) else type(value).__name__)
        if is_dataclass(value):
            yield from facts(value, *at)


SPARSE = [case for case in CASES if build(case.own_spelling()).spec.moe_layers]
KINDS = tuple(SPARSE[i] for i in cover([recorded(case) for case in SPARSE]))
