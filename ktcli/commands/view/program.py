"""`kt show NAME --program`: print the operations of a model's forward pass, as recorded for a CPU.

One line each, and each kind of layer once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ktcli.hardware.text import cpu_text
from ktcli.models import build
from ktcli.native import View
from ktcli.ops.listing import Section, described, read_numbers, sections, telling_facts, weights
from ktcli.ops.passes import reuse_buffers
from ktcli.ops.recording import Number, Record, Recording, record
from ktcli.ops.tensors import Tensor
from ktcli.output import out, safe
from ktcli.weights.recipe import Recipe, format_of

_F32_BYTES = 4


def show_program(name: str, recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Prints the operations of a step of the model with this config, in the number formats of `recipe`; no weight is
    read.
    """
    recording = record(build(config).forward)
    out.result(_document(name, recording), lambda: _render(name, recording, recipe))


def _document(name: str, recording: Recording) -> dict[str, Any]:
    return {
        "name": name,
        "buffers": [
            {"width": each.width, "rows": "outputs" if each.outputs else "tokens"}
            for each in recording.buffers
        ],
        "operations": [described(each) for each in recording.records],
        "results": [{"buffer": each.buffer, "width": each.width} for each in recording.results],
    }


def _render(name: str, recording: Recording, recipe: Recipe) -> str:
    kept = reuse_buffers(recording).buffers
    token = sum(_F32_BYTES * buffer.width for buffer in kept if not buffer.outputs)
    head = (
        f"{safe(name)}: {len(recording.records)} operations in a step. Each %n [columns] is f32 per token;"
        f" {len(kept)} buffers hold them in turn, {token:,} bytes per token."
    )
    lines = _ProgramLines(recording, recipe)
    return "\n\n".join([head, *map(lines.section, sections(recording))])


class _ProgramLines:
    """Makes the lines of a recording, whose weights have formats."""

    def __init__(self, recording: Recording, recipe: Recipe) -> None:
        self._buffers, self._recipe = recording.buffers, recipe

    def section(self, section: Section) -> str:
        """Returns the lines of a section, one for each record, below the layers that they stand for."""
        layers, lines = section.layers, []
        if layers:
            others = cpu_text(layers[1:]).replace(",", ", ")
            alike = f", same for {others}" if others else ""
            lines.append(f"Layer {layers[0]}{alike}")
        prefix = f"layers.{layers[0]}." if layers else ""
        cells = [self._cells(each, prefix) for each in section.records]
        widths = [max(len(row[i]) for row in cells) for i in range(2)]
        for made, done, rest in cells:
            lines.append(f"  {made:>{widths[0]}} {done:<{widths[1]}}  {rest}".rstrip())
        return "\n".join(lines)

    def _cells(self, each: Record, prefix: str) -> tuple[str, str, str]:
        """The three cells of a record: results, operation with its operands, weights and facts."""
        results = [f"{self._value(view)} [{view.width}]" for view in each.outs]
        made = ", ".join([*results, *map(self._value, each.numbers)])
        read = [*each.operands, *read_numbers(each).values()]
        named = [
            f"{field} {tensor.name.removeprefix(prefix)} {self._shape(tensor)}"
            for field, tensor in weights(each).items()
        ]
        facts = [_fact(name, value) for name, value in telling_facts(each).items()]
        done = f"{each.operation.name} {', '.join(self._value(x) for x in read if x is not None)}"
        return (
            made and f"{made} =",
            done.rstrip(),
            "; ".join([*named, ", ".join(facts)]).strip("; "),
        )

    def _value(self, value: View | Number) -> str:
        if isinstance(value, Number):
            return f"{value.kind.value} {value.n}"
        if value.width == self._buffers[value.buffer].width:
            return f"%{value.buffer}"
        return f"%{value.buffer}[{value.column}:{value.column + value.width}]"

    def _shape(self, tensor: Tensor) -> str:
        count = f"{tensor.count} x " if tensor.count > 1 else ""
        rows = f"{tensor.n} x " if tensor.n > 1 else ""
        fmt = format_of(tensor, self._recipe)
        return f"[{count}{rows}{tensor.k}]" + (f" {fmt.name}" if fmt else "")


def _fact(name: str, value: Any) -> str:
    if isinstance(value, Enum):
        return f"{name} {value.name.lower()}"
    if isinstance(value, bool):
        return name if value else f"no {name}"
    if isinstance(value, float):
        return f"{name} {value:.6g}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return " ".join([name, *(f"{key} {x:g}" for key, x in value._asdict().items() if x)])
    if isinstance(value, tuple):
        return f"{name} {value[0]:.4g} … {value[-1]:.4g}"
    return f"{name} {value}"
