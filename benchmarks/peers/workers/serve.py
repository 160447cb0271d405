"""The process an engine lives in: loads once, then runs what its parent asks for, line by line.

    parent:  {"kind": "decode", "n_tokens": 128, "streams": 1, "seed": 7}
    worker:  {"seconds": 1.23}

The first line of the worker is what it has loaded, or why it could not. Whatever an engine prints goes to
stderr. Nothing here needs more than numpy, so that it runs in every environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np


class Engine(Protocol):
    """A loaded engine.

    Attributes:
        vocab: ids are drawn below it.
        about: versions, formats, threads: what the results say of it.
    """

    vocab: int
    about: dict[str, Any]

    def prefill(self, ids: list[int]) -> None:
        """Read a prompt into the empty cache, up to the logits of its last token."""

    def decode(self, ids: list[int]) -> None:
        """From the empty cache: one id after the other, each up to the choice of the next token."""


@runtime_checkable
class StreamsEngine(Engine, Protocol):
    """An engine that computes several sequences together."""

    def decode_streams(self, ids: list[list[int]]) -> None:
        """As `decode`, a step for each row of ids: the next of each sequence, [steps][streams]."""


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load what the command line describes, then answer until the parent closes the pipe."""
    channel = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        engine = load(json.loads(sys.argv[1]))
    except Exception as error:  # whatever an engine raises: the parent reports it and goes on
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"about": engine.about})
    works: dict[str, Callable[[Any], None]] = {
        "prefill": engine.prefill,
        "decode": engine.decode,
    }
    if isinstance(engine, StreamsEngine):
        works["decode streams"] = engine.decode_streams
    for line in sys.stdin:
        job = json.loads(line)
        draw = np.random.default_rng(job["seed"])
        together = job["streams"] > 1
        kind = f"{job['kind']} streams" if together else job["kind"]
        shape = (job["n_tokens"], job["streams"]) if together else job["n_tokens"]
        ids = draw.integers(0, engine.vocab, shape).tolist()
        start = time.perf_counter()
        works[kind](ids)
        say({"seconds": time.perf_counter() - start})
