"""The values of a Mooncake store: each is a page file with one record, under a key that names its space.

What a store gives under a key is trusted no more than a file that somebody left: namespace, layout, label, ids, depths
and checksum have to be those that were asked for.
"""

from __future__ import annotations

from ktcli.pagelabel import PageLabel, U8Array
from ktcli.store.pagefile import (
    Damaged,
    Space,
    alone_bytes,
    parse_table,
    require_bytes,
    require_label,
)

_PREFIX = "kt1"  # the version of keys


def key_of(space: Space, kind: int, key: bytes) -> str:
    """Returns the key under which a KV page or state is stored in Mooncake: "kt1/NAMESPACE-CODEC/KIND/KEY", with the
    namespace and `key` in hexadecimal.
    """
    return f"{_PREFIX}/{space.namespace.hex()}-{space.codec}/{int(kind)}/{key.hex()}"


def value_bytes(label: PageLabel, size_bytes: int) -> int:
    """Returns the size in bytes of the value that stores a KV page or state with `size_bytes` of data."""
    return alone_bytes(len(label.ids), size_bytes)


def read_value(value: U8Array, space: Space, label: PageLabel, data: U8Array) -> None:
    """Copies the data of a KV page or state from its stored value into `data`, uint8, and checks that they belong to
    `label`.

    Raises:
        Damaged: the value is damaged or of another label; the contents of `data` are then undefined.
    """
    _, entries = parse_table(lambda n, at: value[at : at + n].tobytes(), value.size, space)
    if len(entries) != 1:
        raise Damaged("has a damaged header")
    entry = entries[0]
    require_label(entry, label, data.size)
    start = entry.offset + entry.head_bytes
    data[:] = value[start : start + data.size]
    require_bytes(entry, label, value[entry.offset : start].copy(), data)
