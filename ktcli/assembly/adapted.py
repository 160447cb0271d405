"""Opens the adapter that a model is used with: MODEL+ADAPTER."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.ready import Ready, adapted
from ktcli.assembly.request import Wanted
from ktcli.errors import BadCheckpoint, UsageError
from ktcli.hardware.gpu import AUTO, CPU
from ktcli.models import Model, build
from ktcli.planner.memory import AdapterRoom
from ktcli.store import adapters, library
from ktcli.store.reference import parse
from ktcli.weights.pack import Pack

# What reads adapters is loaded for a model that has one.
if TYPE_CHECKING:
    from ktcli.adapters.adapter import Adapter
    from ktcli.adapters.packed import PackedAdapter
    from ktcli.assembly.subject import Subject

# Of a server: adapters that there is room for at a time, and ranks of one product.
_LEAST_ROOM, _LEAST_RANKS = 4, 192


def with_room(named: Ready | Subject, wanted: Wanted, model: Model) -> Wanted:
    """Returns how a model is to be loaded, or planned, with its adapter, if it has one: on the CPU, with room for the
    adapter.

    Raises:
        UsageError: a GPU was asked for.
        NotFound, BadCheckpoint: there is no such adapter, or it is damaged, or it is for another model.
    """
    if not named.adapter:
        return wanted
    if wanted.device.device not in (AUTO, CPU):
        raise UsageError(
            f"adapters run on the CPU, not on {wanted.device.device}",
            hint=f"leave out --device, or merge it: kt convert {named.base} --adapter {named.adapter}",
        )
    from ktcli.adapters.packed import packed_bytes, ranks_of

    with _opened(named.adapter, model) as adapter:
        each, experts = packed_bytes(adapter, exact=wanted.exact)
        room = AdapterRoom(1, ranks_of(adapter), each + experts, each, experts)
    return replace(wanted, device=replace(wanted.device, device=CPU), adapters=room)


def read_adapter(
    ready: Ready, pack: Pack, *, exact: bool, listener: Listener = SILENT
) -> PackedAdapter | None:
    """Returns the adapter of a model, packed for its kernels; None: it has none.

    Raises:
        UsageError: it changes something that cannot be changed beside the model.
        NotFound, BadCheckpoint: there is no such adapter, or it is damaged, or it is for another model.
    """
    if not ready.adapter:
        return None
    from ktcli.adapters.packed import pack_adapter
    from ktcli.assembly.adapters import BaseModel, compare_base

    model = build(pack.config)
    with _opened(ready.adapter, model) as adapter:
        base = BaseModel(parse(ready.base).lasting, ready.base, model)
        compare_base(adapter.settings.base, base, listener)
        for note in adapter.notes:
            listener.warn(note)
        return pack_adapter(adapter, ready.adapter, pack.recipe, exact=exact)


def identity(ready: Ready) -> str:
    """Returns the identity of a model's conversion and of its adapter: equal ones compute the same."""
    found = library.identity(ready.pack)
    if not ready.adapter:
        return found
    from ktcli.assembly.adapters import digest_of

    return f"{found}+{digest_of(adapters.resolve(ready.adapter))}"


def with_rooms(ready: Ready, wanted: Wanted, names: Sequence[str]) -> Wanted:
    """Returns how a model is to be served with several adapters, which take turns in a room for at least _LEAST_ROOM
    of them: on the CPU.

    Args:
        names: of adapters of the library; (): none are served, and there is no room.
    Raises:
        UsageError: a GPU was asked for, or the model has an adapter already.
        NotFound, BadCheckpoint: there is no such adapter, or it is damaged, or it is for another model.
    """
    if not names:
        return wanted
    if ready.adapter:
        raise UsageError(
            f"{ready.name} already names an adapter; --adapter takes the model without one",
            hint=f"name the model alone: kt serve {ready.base} --adapter {ready.adapter}",
        )
    model = build(Pack.open(ready.pack).config)
    rooms = []
    for name in names:
        room = with_room(adapted(ready, name), wanted, model).adapters
        assert room is not None
        rooms.append(room)
    largest = max(rooms, key=lambda room: room.size_bytes)
    most = max(len(rooms), _LEAST_ROOM)
    size = sum(room.size_bytes for room in rooms) + (most - len(rooms)) * largest.size_bytes
    ranks = max(_LEAST_RANKS, *(room.ranks for room in rooms))
    room = replace(largest, most=most, ranks=ranks, size_bytes=size)
    return replace(wanted, device=replace(wanted.device, device=CPU), adapters=room)


def _opened(name: str, model: Model) -> Adapter:
    from ktcli.adapters.folder import open_adapter

    entry = adapters.resolve(name)
    try:
        return open_adapter(entry.path, model)
    except BadCheckpoint as error:
        error.hint = f"kt adapter show {entry.name} says which model it is for"
        raise
