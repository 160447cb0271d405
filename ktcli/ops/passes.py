"""Passes: rewrite recordings into others that compute the same results."""

from __future__ import annotations

from dataclasses import replace

from ktcli.native import View
from ktcli.ops.operation import FieldKind
from ktcli.ops.recording import Buffer, Number, Record, Recording
from ktcli.ops.table.experts import Carry, Experts, SplitRouting


def defer_experts(recording: Recording, layers: int) -> Recording:
    """Returns the recording with each token's experts split, in the first `layers` layers that have experts, into
    immediate and deferred ones. The number of deferred experts is set for each step, not here.

    Deferred experts are computed after the immediate ones, into a separate buffer, and their sum is added to that of
    the next layer's experts.
    """
    records: list[Record] = []
    buffers = list(recording.buffers)
    routings = sum(each.operation.gives.count(FieldKind.ROUTING) for each in recording.records)
    found, deferred = 0, None  # layers with experts so far; what the last of them deferred
    for record in recording.records:
        operation = record.operation
        if not isinstance(operation, Experts):
            records.append(record)
            continue
        found += 1
        before, deferred = deferred, None
        (out,) = record.outs
        if found > layers:
            records.append(record)
        else:
            immediate, later = (Number(FieldKind.ROUTING, routings + i) for i in (0, 1))
            routings += 2
            split = SplitRouting(operation.routed, defers=True)
            records.append(Record(split, (), (immediate, later), record.layer))
            records.append(replace(record, operation=replace(operation, routed=immediate)))
            deferred = View(len(buffers), 0, out.width)
            buffers.append(buffers[out.buffer])
        if before is not None:
            records.append(Record(Carry(out, before), layer=record.layer))
        if deferred is not None:
            put_off = replace(operation, routed=later)
            records.append(Record(put_off, (deferred,), layer=record.layer))
    return Recording(tuple(records), tuple(buffers), recording.results)


def reuse_buffers(recording: Recording) -> Recording:
    """Returns the recording with its buffers reused: one whose contents are no longer read takes the next result of the
    same width and kind of rows, so that a model of sixty layers needs about as many buffers as one layer.
    """
    touched = [{view.buffer: None for view in each.views} for each in recording.records]
    last = {buffer: i for i, every in enumerate(touched) for buffer in every}
    last.update((result.buffer, len(recording.records)) for result in recording.results)
    buffers: list[Buffer] = []
    placed: dict[int, int] = {}
    free: dict[Buffer, list[int]] = {}

    def place(view: View) -> View:
        if view.buffer not in placed:
            kind = recording.buffers[view.buffer]
            if spare := free.get(kind):
                placed[view.buffer] = spare.pop()
            else:
                placed[view.buffer] = len(buffers)
                buffers.append(kind)
        return View(placed[view.buffer], view.column, view.width)

    records = []
    for i, each in enumerate(recording.records):
        records.append(each.renamed(place))
        for buffer in touched[i]:
            if last[buffer] == i:
                free.setdefault(recording.buffers[buffer], []).append(placed[buffer])
    return Recording(tuple(records), tuple(buffers), tuple(map(place, recording.results)))
