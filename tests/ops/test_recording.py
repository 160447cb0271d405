"""Passes over recordings never change what is computed.

Records run on symbols instead of numbers: every column holds the history of how it came about. Before a pass and
after it, the results must have the same history.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest
from reference import CASES, Case, case_named

from ktcli.models import Model, build
from ktcli.native import View
from ktcli.ops.operation import layout_of
from ktcli.ops.passes import defer_experts, reuse_buffers
from ktcli.ops.recording import Number, Record, Recording, record
from ktcli.ops.table.experts import Carry, Experts, SplitRouting

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class History:
    """How every column of every buffer came about, and every number.

    A step that defers nothing: deferred experts and what carries them are left out.
    """

    def __init__(self, recording: Recording) -> None:
        self.columns: dict[tuple[int, int], object] = {}
        self.numbers: dict[Number | None, object] = {}
        for each in recording.records:
            if isinstance(each.operation, SplitRouting):
                immediate, deferred = each.numbers
                self.numbers |= {immediate: self.numbers[each.operation.routed], deferred: None}
            elif not isinstance(each.operation, Carry) and not self._is_deferred(each):
                self._run(each)
        self.results = [self.read(view) for view in recording.results]

    def read(self, view: View) -> tuple[object, ...]:
        places = range(view.column, view.column + view.width)
        return tuple(self.columns.get((view.buffer, i)) for i in places)

    def _is_deferred(self, each: Record) -> bool:
        return isinstance(each.operation, Experts) and self.numbers[each.operation.routed] is None

    def _run(self, each: Record) -> None:
        operation, layout = each.operation, layout_of(type(each.operation))
        named = [getattr(operation, name) for name in layout.weights]
        kept = [getattr(operation, n) for n in (layout.pages, layout.state, layout.first) if n]
        facts = [fact(operation) for fact in layout.facts.values()]
        read = [self.read(view) for view in each.operands if view is not None]
        found = [self.numbers.get(getattr(operation, name)) for name in layout.numbers]
        tensors = [tensor and tensor.name for tensor in named]
        made = hash((operation.name, str([tensors, kept, facts]), tuple(read), tuple(found)))
        overwritten = (getattr(operation, name) for name in operation.overwrites)
        for k, view in enumerate((*each.outs, *overwritten)):
            for i in range(view.width):
                self.columns[view.buffer, view.column + i] = hash((made, k, i))
        self.numbers |= {number: hash((made, i)) for i, number in enumerate(each.numbers)}


# Families whose class has no default for the kinds of layers, or one whose first layers are all of one kind.
UNLIKE_THE_DEFAULT = ("kimi_linear", "lfm2_moe")


def model_of(case: Case, layers: int) -> Model:
    config = case.own_spelling()
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers
    kinds = text.get("layer_types")
    for each in (
        "layer_types",
        "mlp_layer_types",
        "indexer_types",
        "layer_rope_theta",
        "swiglu_limits",
        "swiglu_limits_shared",
        "num_attention_heads_per_layer",
        "no_rope_layers",
        "moe_layers",
    ):
        text.pop(each, None)
    if parts := text.get("layers_block_type"):
        text["layers_block_type"] = (parts * layers)[:layers]
    if case.model_type in UNLIKE_THE_DEFAULT:
        text["layer_types"] = (kinds * layers)[:layers]
    return build(config)


@cache
def of_name(name: str, layers: int) -> tuple[Model, Recording]:
    model = model_of(case_named(name), layers)
    return model, record(model.forward)


def recorded(case: Case, layers: int = 6) -> Recording:
    return of_name(case.name, layers)[1]


@pytest.mark.in_turn("case")
@by_case
def test_passes_keep_the_history(case: Case) -> None:
    recording = recorded(case)
    wanted = History(recording).results
    assert History(reuse_buffers(recording)).results == wanted
    deferring = defer_experts(recording, 3)
    assert History(deferring).results == wanted
    assert History(reuse_buffers(deferring)).results == wanted


@pytest.mark.in_turn("case")
@by_case
def test_more_layers_need_no_more_buffers(case: Case) -> None:
    counts = [len(reuse_buffers(recorded(case, layers)).buffers) for layers in (4, 12)]
    # Linear attention has a convolution and two gates beside the attention of the other layers; DeepSeek-V4 has
    # streams and their weights, two kinds of pooled rows and an indexer; GLM-5.3 has all of these but one, Kimi-Linear
    # second projections of gate and decay. Each layer of Nemotron has another part. A.X K2 has an indexer, and gates
    # of norms. Three more are the summary's.
    most = {
        "qwen3_next": 18,
        "bailing_hybrid": 18,
        "deepseek_v4": 28,
        "glm5_next": 26,
        "nemotron_h": 18,
        "kimi_linear": 21,
        "axk2": 21,
    }
    assert counts[0] == counts[1] <= most.get(case.model_type, 16) + 3


@by_case
def test_deferred_experts_join_the_next_layer(case: Case) -> None:
    recording = recorded(case)
    layers = sum(isinstance(each.operation, Experts) for each in recording.records)
    deferring = max(0, min(3, layers - 1))
    records = defer_experts(recording, deferring).records
    splits = [each for each in records if isinstance(each.operation, SplitRouting)]
    carries = [each for each in records if isinstance(each.operation, Carry)]
    experts = [each for each in records if isinstance(each.operation, Experts)]
    assert len(splits) == len(carries) == deferring
    later = {split.numbers[1] for split in splits}
    deferred = [each for each in experts if each.operation.routed in later]
    assert [each.operation.deferred for each in carries] == [each.outs[0] for each in deferred]
    for carry, before in zip(carries, deferred, strict=True):
        assert carry.layer > before.layer and records.index(before) < records.index(carry)
        (immediate,) = (e for e in experts if e.layer == carry.layer and e not in deferred)
        assert immediate.outs[0] == carry.operation.x


@by_case
def test_nobody_reads_what_was_overwritten(case: Case) -> None:
    """A torch kernel may leave it as it was, so what is read there would differ between backends."""
    gone: dict[int, set[int]] = defaultdict(set)

    def columns(view: View) -> set[int]:
        return set(range(view.column, view.column + view.width))

    for each in recorded(case).records:
        assert not any(columns(v) & gone[v.buffer] for v in each.operands if v), each
        for out in each.outs:
            gone[out.buffer] -= columns(out)
        names = each.operation.overwrites if each.outs else each.operation.overwrites[1:]
        for view in (getattr(each.operation, name) for name in names):
            gone[view.buffer] |= columns(view)


@by_case
def test_every_tensor_is_named_and_every_layer_known(case: Case) -> None:
    model, recording = of_name(case.name, 6)
    named: dict[str, set[int | None]] = defaultdict(set)
    for each in recording.records:
        for name in layout_of(type(each.operation)).weights:
            tensor = getattr(each.operation, name)
            if tensor is not None:
                named[tensor.name].add(each.layer)
    assert {tensor.name: {tensor.layer} for tensor in model.tensors} == named


@by_case
def test_an_operation_caches_what_the_layer_says(case: Case) -> None:
    """Parts of pages lie side by side, and together they are all that a layer keeps of a position."""
    model, recording = of_name(case.name, 6)
    parts: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for each in recording.records:
        if layer := layout_of(type(each.operation)).pages:
            before, own, behind, heads = each.operation.cached
            number = getattr(each.operation, layer)
            parts[number].add((before, before + sum(own)))
            state = model.spec.states[number]
            assert before + sum(own) + behind == state.position_elements
            if (
                state.position_heads
            ):  # all of them are those of this operation: see `LayerState.chooses`
                assert (before, behind) == (0, 0) and sum(heads) == state.position_heads
    for number, found in parts.items():
        ends = [0, *sorted({place for part in found for place in part if part[0] < part[1]})]
        assert ends[-1] == model.spec.states[number].position_elements
