"""Opens the adapter that a model is used with: MODEL+ADAPTER."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.ready import Ready, adapted
from ktcli.assembly.request import Wanted
from ktcli.errors import BadCheckpoint, UsageError
from ktcli.models import Model, build
from ktcli.planner.memory import AdapterRoom, ProductRoom
from ktcli.store import library
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
    """Returns `wanted`, the options to load or plan a model, with room in memory for the adapter that `named` has;
    unchanged if it has none.

    Raises:
        NotFound, BadCheckpoint: there is no such adapter, or it is damaged, or it is for another model.
    """
    if not named.adapter:
        return wanted
    from ktcli.adapters.packed import packed_bytes, product_rooms, ranks_of

    with _opened(named.adapter, model) as adapter:
        each, experts = packed_bytes(adapter, exact=wanted.exact)
        products = product_rooms(adapter)
        room = AdapterRoom(1, ranks_of(adapter), each + experts, each, experts, products)
    return replace(wanted, adapters=room)


def read_adapter(
    ready: Ready, pack: Pack, *, exact: bool, listener: Listener = SILENT
) -> PackedAdapter | None:
    """Returns the LoRA adapter that a converted model is used with, its matrices packed for the native kernels; None if
    `ready` names no adapter.

    Raises:
        UsageError: the adapter changes something that cannot be changed beside the model.
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
    """Returns a text that identifies the weights of a conversion and of its adapter, if it has one: models with equal
    texts compute the same.
    """
    found = library.identity(ready.pack)
    if not ready.adapter:
        return found
    from ktcli.assembly.adapters import digest_of
    from ktcli.store import adapters

    return f"{found}+{digest_of(adapters.resolve(ready.adapter))}"


def with_rooms(ready: Ready, wanted: Wanted, names: Sequence[str]) -> Wanted:
    """Returns `wanted`, the options to load a model, with room in memory for several LoRA adapters that a server uses
    in turn: for those named, and for at least _LEAST_ROOM at a time.

    Args:
        names: the names of adapters in the library; empty: `wanted` is returned unchanged.
    Raises:
        UsageError: the model has an adapter already.
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
    return replace(wanted, adapters=_together(rooms))


def _together(rooms: Sequence[AdapterRoom]) -> AdapterRoom:
    """The room for several adapters, and for others like the largest."""
    largest = max(room.size_bytes for room in rooms)
    most = max(len(rooms), _LEAST_ROOM)
    products: dict[str, ProductRoom] = {}
    for each in chain.from_iterable(room.products for room in rooms):
        products[each.name] = each.covering(products.get(each.name, each))
    return AdapterRoom(
        most,
        max(_LEAST_RANKS, *(room.ranks for room in rooms)),
        sum(room.size_bytes for room in rooms) + (most - len(rooms)) * largest,
        max(room.token_bytes for room in rooms),
        max(room.experts_bytes for room in rooms),
        tuple(products.values()),
    )


def _opened(name: str, model: Model) -> Adapter:
    from ktcli.adapters.folder import open_adapter
    from ktcli.store import adapters

    entry = adapters.resolve(name)
    try:
        return open_adapter(entry.path, model, adapters.unchanged(entry))
    except BadCheckpoint as error:
        error.hint = f"kt adapter show {entry.name} says which model it is for"
        raise
