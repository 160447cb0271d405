"""Loads a model and lets it go, several times: prints the bytes of memory with it and without, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from server.running import serving_models
from server.sources import ScriptedModel, ScriptedOpened
from server.test_serving import ask
from server.test_unloading import unload
from shapes import config
from waits import until

from benchmarks.loading import load_random
from ktcli.assembly.beside import MemoryFit
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening, prepared
from ktcli.dialogue.local import LocalBackend
from ktcli.hardware.memory import resident_bytes
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.server.models.source import ModelFacts
from ktcli.store.entry import BUILTIN
from ktcli.text.model import TextModel, read_text_model
from ktcli.weights.recipe import Recipe

ROUNDS = 4


class RandomModel(ScriptedModel):
    """A model of some size, with random weights."""

    def facts(self) -> ModelFacts:
        return ModelFacts("random", 512, 2048, 1, "", 0)

    def open(
        self, texts: TextModel, fit: MemoryFit, is_stopped: Callable[[], bool]
    ) -> ScriptedOpened:
        shape = config(
            "qwen3-30b-a3b",
            hidden_size=1024,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,
            num_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=512,
            vocab_size=2048,
        )
        engine = load_random(shape, Recipe(), Wanted(512, threads=1, streams=2))
        return ScriptedOpened(LocalBackend(self.name, engine, texts), self)


def main() -> None:
    how = Opening(Wanted(512, threads=1, streams=2), quota_bytes=1 << 30, records_heat=True)
    texts: Any = read_text_model(BUILTIN, prepared(BUILTIN, how).pack)
    model = RandomModel(LocalBackend("random", cast(Any, None), texts))

    def resident() -> int:
        return resident_bytes(SYSTEM_ROOT) or 0

    rounds = []
    with serving_models([model]) as server:
        for _ in range(ROUNDS):
            assert ask(server, "What is kt? " * 20, max_tokens=20, ignore_eos=True).ok
            there = resident()
            unload(server, "random")
            until(lambda: there - resident() > 40 << 20)  # noqa: B023
            rounds.append((there, resident()))
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
