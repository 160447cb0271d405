"""The process an engine lives in: loads once, then runs what its parent asks for, line by line.

    parent:  {"kind": "decode", "n_tokens": 128, "seed": 7}
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
from typing import Any, Protocol

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
    works = {"prefill": engine.prefill, "decode": engine.decode}
    for line in sys.stdin:
        job = json.loads(line)
        draw = np.random.default_rng(job["seed"])
        ids = draw.integers(0, engine.vocab, job["n_tokens"]).tolist()
        start = time.perf_counter()
        works[job["kind"]](ids)
        say({"seconds": time.perf_counter() - start})
