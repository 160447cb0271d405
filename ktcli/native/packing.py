"""Packs values by field name into the struct that an operation of a program takes.

The C type of a field says how its value is packed: an array of numbers is borrowed, a tuple of them copied, weights
become an array with one for each node or the one that is a field itself, a value with fields is a struct of its own,
and everything else is a number. None is 0 or NULL. There is no list of operations here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import NativeError
from ktcli.native.library import Weight, c_weights, library, require

_DTYPES = {"float": "float32", "int32_t": "int32", "uint16_t": "uint16", "uint8_t": "uint8"}
_WEIGHT = "struct kt_weight"

# A packer returns the value that cffi stores, and adds to a list the objects that must live as long as the struct.
Packer = Callable[[Any, list[Any]], Any]


class Packing:
    """The rules by which the fields of one struct are packed.

    Args:
        name: the struct's name, e.g. "kt_norm".
        nodes: the number of the pool's nodes, which is that of the weights behind a pointer to weights.
    """

    def __init__(self, name: str, nodes: int) -> None:
        self._ffi, _ = library()
        self._name, self._pointer = name, f"{name} *"
        fields: Sequence[tuple[str, Any]] = self._ffi.typeof(name).fields
        self._packers = {field: _packer(of.type, nodes) for field, of in fields}

    def pack(self, values: Mapping[str, Any], keep: list[Any]) -> Any:
        """Returns a new C struct with these values by field name; fields that are not given are 0.

        Args:
            keep: a list to which the objects are added that must live as long as the struct.
        Raises:
            NativeError: a name is not that of a field, or an array has the wrong type.
        """
        made: dict[str, Any] = {}
        for field, value in values.items():
            if field not in self._packers:
                raise NativeError(f"{self._name} has no field {field!r}")
            if value is not None:
                made[field] = self._packers[field](value, keep)
        return self._ffi.new(self._pointer, made)


@cache
def packing(name: str, nodes: int) -> Packing:
    """Returns the rules for packing values into the C struct `name`, made once for each pair of arguments."""
    return Packing(name, nodes)


def _packer(of: Any, nodes: int) -> Packer:
    ffi, _ = library()
    if of.kind == "struct":
        require(of.cname == _WEIGHT, f"a {of.cname} by value")
        return _one_weight
    if of.kind != "pointer":
        return lambda value, keep: value
    if of.item.cname == _WEIGHT:
        return lambda value, keep: _weights(value, nodes, keep)
    if of.item.kind == "struct":
        return lambda value, keep: _kept(ffi.new(of, value._asdict()), keep)
    ctype, dtype = f"{of.item.cname}[]", np.dtype(_DTYPES[of.item.cname])
    return lambda value, keep: _kept(ffi.from_buffer(ctype, _array(value, dtype)), keep)


def _kept(made: Any, keep: list[Any]) -> Any:
    keep.append(made)
    return made


def _array(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    array: NDArray[Any] = np.array(value, dtype) if isinstance(value, tuple) else value
    if array.dtype != dtype:
        raise NativeError(f"an array of {array.dtype}, where {dtype} is needed")
    require(array.flags.c_contiguous, "array is not contiguous")
    return array


def _weights(value: Sequence[Weight], nodes: int, keep: list[Any]) -> Any:
    require(len(value) == nodes, f"{len(value)} slices of a weight for {nodes} nodes")
    keep += value
    return _kept(c_weights(*value), keep)


def _one_weight(value: Sequence[Weight], keep: list[Any]) -> Any:
    require(len(value) == 1, f"{len(value)} slices of a weight that nodes do not share")
    keep += value
    return _kept(c_weights(*value), keep)[0]
