"""Reusing buffers never changes what a program computes.

The recorded operations run on symbols instead of numbers: every column holds the history of how it came
about. With and without reuse, the result must have the same history.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import CASES, Case

from ktcli.models import Model, build
from ktcli.native import View, Weight
from ktcli.ops.native import NativeBackend
from ktcli.ops.tensors import Role
from ktcli.weights.formats import FORMATS


class Symbols:
    """Stands in for a `Program`: an operation writes hashes of what it reads."""

    def __init__(self) -> None:
        self.memory: dict[int, list[int]] = {}
        self.kinds: list[tuple[int, bool]] = []
        self.routings = 0
        self.routed: dict[int, int] = {}

    def buffer(self, width: int, *, outputs: bool = False) -> View:
        self.kinds.append((width, outputs))
        return View(len(self.kinds) - 1, 0, width)

    def read(self, view: View) -> tuple[int, ...]:
        columns = self.memory.setdefault(view.buffer, [0] * 4096)
        return tuple(columns[view.column : view.column + view.width])

    def write(self, view: View, *history: object) -> None:
        columns = self.memory.setdefault(view.buffer, [0] * 4096)
        for i in range(view.width):
            columns[view.column + i] = hash((i, *history))

    def route(self, logits: View, rule: Any, bias: Any, table: Any) -> int:
        self.routings += 1
        self.routed[self.routings] = hash((self.read(logits), rule))
        return self.routings

    def experts(
        self, out: View, x: View, routing: int, gate_up: Any, down: Any, *options: Any
    ) -> None:
        self.write(out, self.read(x), self.routed[routing], down[0].address)

    def rope_table(self, inv_freq: Any, scale: float, shift: int) -> int:
        return 0

    def rope(self, x: View, *rest: Any) -> None:
        self.write(x, "rope", self.read(x), rest)

    def mix(self, x: View, *rest: Any) -> None:
        self.write(x, "mix", self.read(x))

    def delta(self, out: View, qkv: Any, gates: Any, *rest: Any) -> None:
        read = [self.read(view) for view in (*qkv, *gates)]
        for view in (out, *qkv[:2], *gates):
            self.write(view, "delta", *read)

    def finish(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        """Every other operation: the first view is written, the others are read."""

        def operation(out: View, *args: Any) -> None:
            weights = [w for a in args for w in (a if isinstance(a, tuple) else [])]
            facts = [w.address for w in weights if isinstance(w, Weight)]
            self.write(out, name, *facts, *(self.read(a) for a in args if isinstance(a, View)))

        return operation


def backend_of(model: Model) -> tuple[NativeBackend, View]:
    loaded: dict[str, Any] = {}
    for number, tensor in enumerate(model.tensors):
        if tensor.role in (Role.VECTOR, Role.TABLE):
            loaded[tensor.name] = np.zeros(tensor.k)
        else:
            weight = Weight(FORMATS["int8"], tensor.n, tensor.k, tensor.count, number, None)
            loaded[tensor.name] = (weight,)
    offsets = range(0, 64 * model.spec.layers, 64)
    backend = NativeBackend(loaded, offsets, offsets)
    return backend, model.forward(backend)


def model_of(case: Case, layers: int) -> Model:
    config = case.own_spelling()
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers
    for each in (
        "layer_types",
        "mlp_layer_types",
        "indexer_types",
        "layer_rope_theta",
        "swiglu_limits",
        "swiglu_limits_shared",
        "num_attention_heads_per_layer",
    ):
        text.pop(each, None)
    return build(config)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reuse_keeps_the_history(case: Case) -> None:
    backend, result = backend_of(model_of(case, 6))
    virtual = Symbols()
    for operation in backend._operations:
        operation.emit(virtual, operation.views)  # type: ignore[arg-type]
    backend, result_again = backend_of(model_of(case, 6))
    reused = Symbols()
    (placed,) = backend.record(reused, result_again)  # type: ignore[arg-type]
    assert reused.read(placed) == virtual.read(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_more_layers_need_no_more_buffers(case: Case) -> None:
    counts = []
    for layers in (4, 12):
        backend, result = backend_of(model_of(case, layers))
        program = Symbols()
        backend.record(program, result)  # type: ignore[arg-type]
        counts.append(len(program.kinds))
    # Linear attention has a convolution and two gates beside the attention of the other layers; DeepSeek-V4 has
    # streams and their weights, two kinds of pooled rows and an indexer; GLM-5.3 has all of these but one.
    most = {"qwen3_next": 18, "bailing_hybrid": 18, "deepseek_v4": 28, "glm5_next": 26}
    assert counts[0] == counts[1] <= most.get(case.model_type, 16)
