"""MLPs of layers that rules keep in main memory, as parts of the program that the CPU runs beside a device's stream.

Shared experts and dense MLPs need nothing but the layer's rows. Their operations are those that the model's own forward
records; the buffers of one are used by the next, since a stream asks for one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from ktcli.engine.device.stream import Stream
from ktcli.models import Model
from ktcli.native import Program, View
from ktcli.ops.backend import Block, Value
from ktcli.ops.native import Loaded, Places, append
from ktcli.ops.part import LayerPart, RowOf
from ktcli.ops.passes import reuse_buffers
from ktcli.ops.recording import Record, Recorder, Recording
from ktcli.ops.table.rowwise import Linear
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class HostBlock:
    """An MLP in main memory.

    Attributes:
        recording: its operations; the first one reads its rows, the result is its output.
        tensors: its weights and biases in main memory, by name.
        stream: the stream in which its layer runs.
        row: its row of kernels; None: the pool's.
    """

    part: LayerPart
    recording: Recording
    tensors: Mapping[str, Loaded]
    stream: Stream
    row: str | None = None


def host_blocks(
    model: Model,
    parts: Collection[LayerPart],
    loaded: Mapping[str, Loaded],
    vectors: Mapping[str, Tensor],
    streams: Mapping[int, Stream],
    rows: RowOf,
) -> list[HostBlock]:
    """Returns one `HostBlock` for each of `parts`, MLPs or shared experts that the CPU computes: its recorded
    operations, its weights in main memory and its layer's stream.

    Args:
        parts: the layers' parts that lie in main memory.
        loaded: their weights in main memory, by name.
        vectors: the vectors on the devices, by name; main memory gets copies of the parts' biases.
        streams: the stream of each layer, by its number.
        rows: the kernels' instruction set of some parts; the others use the pool's.
    """
    found = []
    for part, recording in _recordings(model, parts).items():
        linear = (
            each.operation for each in recording.records if isinstance(each.operation, Linear)
        )
        biases = [operation.bias.name for operation in linear if operation.bias is not None]
        copied = {name: vectors[name].cpu().numpy().copy() for name in biases}
        memory, stream = {**loaded, **copied}, streams[part.layer]
        found.append(HostBlock(part, recording, memory, stream, rows.get(part)))
    return found


def _recordings(model: Model, wanted: Collection[LayerPart]) -> dict[LayerPart, Recording]:
    """The operations of some parts of layers, each recorded by itself."""
    finder = _Finder(wanted)
    if wanted:
        model.forward(finder)
    missing = set(wanted) - finder.found.keys()
    assert not missing, f"no part of the model by itself: {missing}"
    return finder.found


class _Finder(Recorder):
    """A recorder that records the wanted parts of layers once more, each by itself."""

    def __init__(self, wanted: Collection[LayerPart]) -> None:
        super().__init__()
        self._wanted = wanted
        self.found: dict[LayerPart, Recording] = {}

    def block(self, part: LayerPart, x: Value, compute: Block) -> Value:
        """Records a part of a layer, by itself too if it is wanted."""
        if part in self._wanted:
            alone = Recorder()
            made = compute(alone, alone.given(x.width))
            self.found[part] = reuse_buffers(alone.finish(made))
        return super().block(part, x, compute)


class SharedBuffers:
    """The buffers of a program that blocks use one after the other."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[tuple[int, int], View] = {}

    def append(self, block: HostBlock) -> tuple[View, View]:
        """Appends a block's operations to the program; returns the pair (input, output) of views of the program's
        buffers: the rows that the block reads, and those that it writes.
        """
        widths = [buffer.width for buffer in block.recording.buffers]
        views = [self._view(width, widths[:i].count(width)) for i, width in enumerate(widths)]

        def place(view: View) -> View:
            return View(views[view.buffer].buffer, view.column, view.width)

        records = [record.renamed(place) for record in block.recording.records]
        x = _read(records[0])
        self._program.input(x)
        self._program.use_row(block.row)
        for record in records:
            append(record, self._program, Places(block.tensors))
        (out,) = map(place, block.recording.results)
        return x, out

    def _view(self, width: int, number: int) -> View:
        """The buffer of this number among those of a width."""
        if (width, number) not in self._made:
            self._made[width, number] = self._program.buffer(width)
        return self._made[width, number]


def _read(record: Record) -> View:
    """The rows that an operation reads first."""
    view = record.operands[0]
    assert view is not None
    return view
