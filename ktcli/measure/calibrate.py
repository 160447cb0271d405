"""Measures the size of each matrix's inputs while a model reads a text; a calibrated conversion weights errors by it.

The error of a product is the error of each weight times the input of its column; so a column whose inputs are large
counts more. The text goes through the model stage by stage, all of it through one stage before the next: a stage is one
layer, or a few that attend to what the first of them has chosen. Its weights come from the checkpoint, are encoded in 8
bits, and are forgotten behind it; of the text only the residual is kept. Sums are made row by row, in f64, in the order
of the text, so they do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.engine.forms import expanded_spans, how_to_read
from ktcli.engine.kvcache import PageLayout, StateLayout
from ktcli.engine.loader import load_tensors
from ktcli.engine.pagetable import pages_for
from ktcli.errors import KtError
from ktcli.measure.encoded import EncodedSource
from ktcli.measure.stage_files import StageFiles
from ktcli.models import Model
from ktcli.native import Batch, Pool, Program, Run
from ktcli.ops.native import Apart, Assembled, Places, assemble
from ktcli.ops.operation import Operation, layout_of
from ktcli.ops.part import ModelPart
from ktcli.ops.passes import reuse_buffers
from ktcli.ops.recording import Recorder, Recording
from ktcli.ops.state import LayerState
from ktcli.ops.table.experts import Experts
from ktcli.ops.table.rowwise import Linear
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass
from ktcli.weights.check import kept_in_f32
from ktcli.weights.formats import FORMATS
from ktcli.weights.importance import Importance, StepArray, measured, steps_of
from ktcli.weights.recipe import Recipe, stored_bytes
from ktcli.weights.storage import Reader

WINDOW = 512  # tokens read from an empty cache
AT_ONCE = 4  # windows read together
# Down is not rotated, so that what it reads can be looked at as it is.
RECIPE = Recipe(FORMATS["int8"], FORMATS["int8"], down=FORMATS["int8-row"])
_PAGES = pages_for(WINDOW)

Rows = NDArray[np.float32]
Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]


@dataclass
class _Sums:
    """The sums over the inputs of one tensor's matrices: squares [count, k], and the number of rows [count]."""

    squares: NDArray[np.float64]
    rows: NDArray[np.float64]

    @classmethod
    def of(cls, tensor: Tensor) -> _Sums:
        return cls(np.zeros((tensor.count, tensor.k)), np.zeros(tensor.count))

    def add(self, x: Rows, pool: Pool) -> None:
        """Adds the inputs x [T, K] of the only matrix."""
        pool.add_squares(x, np.array([len(x)]), self.squares)
        self.rows[0] += len(x)

    def add_parts(self, x: Rows, ends: Numbers, pool: Pool, rows: Numbers | None = None) -> None:
        """Adds those rows of x [T, K] that each matrix reads, see `Pool.add_squares`."""
        pool.add_squares(x, ends, self.squares, rows)
        self.rows += np.diff(ends, prepend=0)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A part of the forward pass whose weights are in memory at the same time.

    Attributes:
        recording: its results are the residual behind it, or what the head reads, and the residual before it, if it
            reads that.
        layers: the numbers of its decoder layers.
        head: the matrix that reads its first result; None: another stage does.
    """

    recording: Recording
    layers: range = range(0)
    head: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that its operations name."""
        found = {}
        for each in self.recording.records:
            for name in layout_of(type(each.operation)).weights:
                tensor = getattr(each.operation, name)
                if tensor is not None:
                    found[tensor.name] = tensor
        return list(found.values())

    @property
    def measured(self) -> list[Tensor]:
        """The tensors whose inputs it computes."""
        return [*self.tensors, *([self.head] if self.head else [])]


def _stages(model: Model) -> Iterator[_Stage]:
    """Yields the stages of a forward pass: the embedding, the layers, and what comes before the head."""
    recorder = Recorder()
    out = model.part(recorder, None, 0, 0)
    yield _Stage(recorder.finish(out))
    width, last = out.width, model.spec.layers
    for first, end in pairwise((0, *model.borders, last)):
        recorder = Recorder()
        x = entry = recorder.given(width)
        for number in range(first, end):
            x = model.layer(recorder, x, number)
        yield _Stage(recorder.finish(x, entry), range(first, end))
    recorder = Recorder()
    entry = recorder.given(width)
    model.part(recorder, entry, last, last)
    whole = recorder.finish()
    for i, each in enumerate(whole.records):
        product = each.operation
        if isinstance(product, Linear) and product.weight.part is ModelPart.HEAD:
            before = Recording(whole.records[:i], whole.buffers, (product.x, entry))
            yield _Stage(before, head=product.weight)


def need_bytes(model: Model, tokens: int) -> int:
    """Returns the bytes of memory that a calibration with a text of `tokens` tokens needs for the weights of its
    largest stage (usually one layer) and the residuals (hidden states) of the text before and behind it, buffers not
    included."""
    width = largest = 0
    for stage in _stages(model):
        width = max(width, stage.recording.results[0].width)
        largest = max(largest, _weight_bytes(stage))
    return largest + 2 * 4 * width * tokens


def _weight_bytes(stage: _Stage) -> int:
    return sum(stored_bytes(tensor, RECIPE) for tensor in stage.tensors)


class CalibrationRun:
    """The sums over the inputs of a model's matrices while it reads a text, stage by stage.

    Attributes:
        done: the number of stages that were run.
        total: the number of stages.
    """

    def __init__(
        self,
        checkpoint: Reader,
        model: Model,
        pool: Pool,
        ids: Sequence[int],
        begin: int | None,
        files: StageFiles | None = None,
    ) -> None:
        """Begins a measurement, or goes on with an earlier one.

        Args:
            checkpoint: the checkpoint of the model, checked.
            pool: one team, whose memory lies anywhere.
            ids: the ids of the text.
            begin: the id before each window; None: the model has none.
            files: what an earlier one with the same arguments has left, to go on from; None: nothing is kept.
        """
        self._model = model = model.at(WINDOW)
        recipe = replace(RECIPE, in_f32=kept_in_f32(model, checkpoint))
        self._tensors = {tensor.name: tensor for tensor in measured(model)}
        self._sums = {name: _Sums.of(tensor) for name, tensor in self._tensors.items()}
        self._batches = [_batch(model, each) for each in _windows(ids, begin)]
        self._residuals: list[Rows] = []
        self._before: list[Rows] = []  # the last stage's, whose memory the next one takes
        self._stages = list(_stages(model))
        self._source = EncodedSource(
            checkpoint, recipe, pool, max(map(_weight_bytes, self._stages))
        )
        self._files = files
        self._steps: dict[str, StepArray] = {}  # of what no stage will add to
        self.total = len(self._stages)
        self.done = self._restored() if files else 0

    def run_next(self) -> None:
        """Runs the next stage of the forward pass (usually one layer) over the whole text, and adds the squares of its
        matrices' inputs to the sums.

        Raises:
            BadCheckpoint: a value is NaN, Inf or too large for 8 bits, or a file cannot be read.
            KtError: a layer computes numbers that are not finite.
        """
        stage = self._stages[self.done]
        running = _StageRun(self._model, stage, self._source, self._sums)
        found = running.run(self._batches, self._residuals, self._before)
        self._before, self._residuals = self._residuals, found
        del running  # its memory is given back
        if self._files:
            self._files.add(self.done, _arrays(stage, self._sums), self._residuals)
        self.done += 1

    def close(self) -> None:
        """Waits until what is done is written to the files."""
        if self._files:
            self._files.wait()

    def stages_of(self, tensors: Iterable[Tensor]) -> int:
        """Returns how many stages of the forward pass, from the first on, must have run so that the importance of the
        columns of `tensors` is known."""
        names = {tensor.name for tensor in tensors}
        read = ((i, {t.name for t in stage.measured}) for i, stage in enumerate(self._stages, 1))
        return max((i for i, own in read if own & names), default=0)

    def importance(self, tensors: Iterable[Tensor] | None = None) -> Importance:
        """Returns the importance of the columns of `tensors`, whose stages must have run (see `stages_of`); with None
        for `tensors`, of all tensors of the model."""
        steps = {}
        for name in self._tensors if tensors is None else (tensor.name for tensor in tensors):
            if name not in self._steps and name in self._tensors:
                sums = self._sums[name]
                self._steps[name] = steps_of(self._tensors[name], sums.squares, sums.rows)
            if name in self._steps:
                steps[name] = self._steps[name]
        return Importance(steps)

    def _restored(self) -> int:
        """Takes over what is done, and returns the number of stages that it is; 0 where files do not fit."""
        files, stages = self._files, self._stages
        assert files is not None
        done = files.done()
        if not 0 < done <= len(stages):
            return 0
        width = stages[done - 1].recording.results[0].width
        behind = files.read_residuals(done - 1)
        found = [
            (files.read_sums(i), _arrays(stage, self._sums))
            for i, stage in enumerate(stages[:done])
        ]
        fits = all(values.size == sum(array.size for array in arrays) for values, arrays in found)
        if not fits or behind.size != width * sum(batch.rows for batch in self._batches):
            return 0
        for values, arrays in found:
            _scatter(values, arrays)
        self._residuals = [np.empty((b.rows, width), np.float32) for b in self._batches]
        _scatter(behind, self._residuals)
        return done


def _arrays(stage: _Stage, sums: Mapping[str, _Sums]) -> list[NDArray[np.float64]]:
    """The sums of a stage's tensors, in place."""
    own = [sums[tensor.name] for tensor in stage.measured if tensor.name in sums]
    return [array for each in own for array in (each.squares, each.rows)]


def _scatter(values: NDArray[Any], arrays: Sequence[NDArray[Any]]) -> None:
    """Fills arrays with values that lie one behind the other."""
    ends = np.cumsum([array.size for array in arrays])
    for array, part in zip(arrays, np.split(values, ends[:-1]) if arrays else (), strict=True):
        array[...] = part.reshape(array.shape)


def _windows(ids: Sequence[int], begin: int | None) -> Iterator[list[Ids]]:
    """Yields the windows that are read together."""
    before = [] if begin is None else [begin]
    step = WINDOW - len(before)
    cut = [np.array([*before, *ids[at : at + step]], np.int32) for at in range(0, len(ids), step)]
    for first in range(0, len(cut), AT_ONCE):
        yield cut[first : first + AT_ONCE]


def _batch(model: Model, windows: Sequence[Ids]) -> Batch:
    """The windows as sequences of their own, each with the pages and the state of its place; all rows are outputs."""
    runs = []
    for i, ids in enumerate(windows):
        pages = np.arange(i * _PAGES, i * _PAGES + pages_for(ids.size), dtype=np.int32)
        how = how_to_read(b"", ids.size, latent=model.spec.latent)
        spans = expanded_spans(how) if model.spec.latent else []
        runs.append(
            Run(
                ids,
                0,
                pages,
                0,
                next_state=i if model.spec.sequence_elements else -1,
                window_pages=pages if model.spec.window else None,
                expanded=spans[0] if spans else (0, 0),
            )
        )
    return Batch(tuple(runs))


class _StageRun:
    """A stage with its weights in memory, and the program that computes it."""

    def __init__(
        self, model: Model, stage: _Stage, source: EncodedSource, sums: dict[str, _Sums]
    ) -> None:
        self._stage, self._sums, self._top_k = stage, sums, model.spec.top_k
        rows, pool = AT_ONCE * WINDOW, source.pool
        states = model.spec.states
        own = tuple(s if i in stage.layers else LayerState() for i, s in enumerate(states))
        spec = replace(model.spec, states=own)
        pages, kept = PageLayout.of(spec), StateLayout.of(spec)
        loaded = load_tensors(stage.tensors, source.recipe, source, pool, arena=source.arena)
        places = Places(loaded.by_name, pages.offsets, kept.offsets, pages.windowed)
        self._program = program = Program(pool, max_tokens=rows, max_outputs=rows, exact=False)
        program.keep_hidden()
        self._made: Assembled = assemble(
            reuse_buffers(stage.recording), program, places, self._is_measured
        )
        room, state_bytes = AT_ONCE * _PAGES, kept.size_bytes
        program.attach(
            pool.arena(room * pages.page_bytes), pages.page_bytes,
            pool.arena(AT_ONCE * state_bytes) if state_bytes else None, state_bytes,
        )  # fmt: skip
        if spec.window:
            program.attach_windows(pool.arena(room * pages.window_bytes), pages.window_bytes)

    def _is_measured(self, operation: Operation) -> bool:
        """Returns whether what an operation reads is summed up."""
        if isinstance(operation, Linear):
            return operation.weight.name in self._sums
        return isinstance(operation, Experts)

    def run(
        self, batches: Sequence[Batch], residuals: Sequence[Rows], spare: Sequence[Rows]
    ) -> list[Rows]:
        """Computes all batches from the residuals before the stage, and returns those behind it, in the memory of
        `spare` where that has their shapes.

        Raises:
            KtError: one holds a number that is not finite.
        """
        program, (out, *entry) = self._program, self._made.results
        apart = {each.part: each for each in self._made.apart}
        found = []
        for at, batch in enumerate(batches):
            for view in entry:
                program.rows(view, batch.rows)[:] = residuals[at]
            for part in range(self._made.parts):
                looked_at = apart.get(part)
                if looked_at:
                    self._before(looked_at, batch.rows)
                program.run_part(batch, part)
                if looked_at and looked_at.routing is not None:
                    self._behind(looked_at, batch.rows)
            behind = program.rows(out, batch.rows)
            if len(spare) == len(batches) and spare[at].shape == behind.shape:
                spare[at][:] = behind
                behind = spare[at]
            else:
                behind = behind.copy()
            if not np.isfinite(behind).all():
                layers = self._stage.layers
                what = f"layer {layers[-1]}" if layers else "the embedding or the last norm"
                raise KtError(
                    f"{what} gives numbers that are not finite, so nothing can be calibrated",
                    hint="kt verify checks the model's files; --calibrate off converts without",
                )
            if self._stage.head:
                self._sums[self._stage.head.name].add(behind, program.pool)
            found.append(behind)
        return found

    def _before(self, apart: Apart, rows: int) -> None:
        """Sums up what a product, or the first of experts, is going to read."""
        operation, pool = apart.operation, self._program.pool
        if isinstance(operation, Linear):
            x = self._program.rows(operation.x, rows)
            self._sums[operation.weight.name].add(x, pool)
        elif isinstance(operation, Experts):
            x = self._program.rows(operation.x, rows)
            slots, ends = self._slots(apart, rows)
            self._sums[operation.gate_up.name].add_parts(x, ends, pool, slots // self._top_k)

    def _behind(self, apart: Apart, rows: int) -> None:
        """Sums up what the second product of experts has read."""
        operation = apart.operation
        assert isinstance(operation, Experts)
        slots, ends = self._slots(apart, rows)
        hidden = self._program.hidden(slots.size, operation.down.k)
        self._sums[operation.down.name].add_parts(hidden, ends, self._program.pool)

    def _slots(self, apart: Apart, rows: int) -> tuple[Numbers, Numbers]:
        """The slots of a routing by expert, and by token within one; and where those of each expert end."""
        assert isinstance(apart.operation, Experts) and apart.routing is not None
        ids = self._program.routing(apart.routing, rows, self._top_k)[0].reshape(-1)
        counts = np.bincount(ids, minlength=apart.operation.down.count)
        return np.argsort(ids, kind="stable"), np.cumsum(counts)
