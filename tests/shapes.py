"""Models and machines as data, for tests: the catalogue's configs and a few made-up hosts."""

from __future__ import annotations

from typing import Any

from ktcli.models import Model, build
from ktcli.planner.cost import Rates
from ktcli.planner.host import Host
from ktcli.store import catalog

GB = 10**9
GIB = 1 << 30


def config(name: str, **changes: Any) -> dict[str, Any]:
    """The config of a catalogue model, with some fields changed."""
    return {**catalog.get(name).config, **changes}


_SHAPES: dict[str, Model] = {}


def shape(name: str, **changes: Any) -> Model:
    """A catalogue model without weights; it is frozen, and built once for all tests that ask for it."""
    made = config(name, **changes)
    key = repr(made)
    if key not in _SHAPES:
        _SHAPES[key] = build(made)
    return _SHAPES[key]


RATES = Rates(read_bps=50e9, int8_ops=2e12, bf16_ops=1e12, measured=True, basis="made up")


def host(gib: float, rates: Rates = RATES, threads: int = 2) -> Host:
    """A machine with so much memory, all of it available."""
    size = int(gib * GIB)
    return Host("made up", threads, "avx512", size, size, rates)
