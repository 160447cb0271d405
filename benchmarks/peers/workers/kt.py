"""kt itself: the engine behind `kt bench`, in a process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.loading import load_random
from benchmarks.peers.workers.serve import serve
from ktcli import __version__
from ktcli.assembly.request import Wanted
from ktcli.measure.streams import GreedyChoice, Streams
from ktcli.measure.synthetic import expert_spread
from ktcli.store import catalog
from ktcli.weights.recipe import Recipe

_SEED = 20_260_101


class Kt:
    """A random engine and one session on it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        profile = catalog.find(spec["model"])
        assert profile is not None, "the rows name models of the catalogue"
        recipe = Recipe.named(spec["experts"], spec["dense"])
        wanted = Wanted(spec["context"], spec["threads"], streams=spec["streams"])
        engine = load_random(profile.config, recipe, wanted, spec["layers"])
        self._engine, self._session = engine, engine.session()
        self._choice = GreedyChoice(engine)
        self.vocab = engine.spec.vocab
        spread = expert_spread(engine, self._session, _SEED)
        self.about: dict[str, Any] = {
            "version": __version__,
            "isa": engine.pool.isa,
            "threads": engine.pool.threads,
            "experts": recipe.experts_name,
            "dense": recipe.dense.name,
            "weights_bytes": engine.weights_bytes,
        }
        if spread is not None:
            self.about["experts_seen_percent"] = 100 * spread.seen
            self.about["experts_seen_percent_if_even"] = 100 * spread.expected

    def prefill(self, ids: list[int]) -> None:
        self._session.truncate(0)
        self._session.feed(ids)

    def decode(self, ids: list[int]) -> None:
        self._session.truncate(0)
        for token in ids:
            self._choice.choose([self._session.feed([token])])

    def decode_streams(self, ids: list[list[int]]) -> None:
        streams = Streams(self._engine, len(ids[0]), 0, np.random.default_rng(_SEED))
        streams.once(np.array(ids, dtype=np.int32))
        streams.close()


if __name__ == "__main__":
    serve(Kt)
