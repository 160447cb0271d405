"""Parses the bodies of requests: JSON of limited depth and decoded size, as a structure whose fields are checked.

The memory of all bodies that a server has received and not yet parsed is limited, too. JSON that does not fit its
structure is read as clients write it. A serializer writes `"stream": null` for an option that nobody set, and 4096.0
where its language has one number type.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import inspect
from starlette.requests import Request

from ktcli.records import dataclass
from ktcli.server.http.refusals import Refusal

T = TypeVar("T")
BODY = "kt.body"  # the key of a scope under which the guard puts the body of a request
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors and libraries put before a text
DEPTH_MOST = 64  # nested arrays and objects; what agents send has about 15
DECODED_BYTES_MOST = 80 << 20  # a million ids take 64 MiB
_LARGE_BYTES = 1 << 18  # that are looked at on another thread
_BLOCK_BYTES = 1 << 20
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
# What CPython 3.11 takes for an array with its first item, an object, a pair with its text, and a further item.
_BYTES_OF = {b"[": 88, b"{": 64, b":": 184, b",": 64}
_PAIR = re.compile(rb"\\u[dD][89abAB]")  # the escape of a character beyond 16 bits
_BEYOND_16_BITS = re.compile(rb"[\xf0-\xf4]")


@dataclass(frozen=True, slots=True)
class JsonShape:
    """The depth and size of a JSON document.

    Attributes:
        depth: the nesting depth of arrays and objects.
        values: the number of arrays, objects, and values in them, names of fields included; 0: it is one plain value.
        decoded_bytes: the memory that its values take once decoded, without their strings.
    """

    depth: int
    values: int
    decoded_bytes: int

    @property
    def is_small(self) -> bool:
        """Whether the document has at most 64 nested levels, and its values take at most 256 KiB once decoded."""
        return self.depth <= DEPTH_MOST and self.decoded_bytes <= _LARGE_BYTES


_BACKSLASH = b"\0\1"  # in the place of an escaped one: no JSON text has these bytes
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HIGH_ALONE, _LOW_ALONE = (
    re.compile(_HIGH + b"(?!%b)" % _LOW),
    re.compile(b"(?<!%b)%b" % (_HIGH, _LOW)),
)


async def body_of(request: Request, kind: type[T]) -> T:
    """Returns the JSON body of a request, parsed as a structure of the type `kind`.

    Raises:
        Refusal: the body is not valid JSON, is nested too deeply or too large, or has a field of the wrong type.
    """
    data: bytes = request.scope[BODY]
    is_large = len(data) > _LARGE_BYTES
    if is_large:
        await asyncio.to_thread(require_decodable, data)
    else:
        require_decodable(data)
    try:
        return await asyncio.to_thread(decoded, data, kind) if is_large else decoded(data, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".").removeprefix("[...]")  # of an unknown field
        raise Refusal(
            400, f"{field or 'the request body'}: {what}", field, "invalid_type"
        ) from error
    except UnicodeDecodeError as error:
        said = f"the request body is not valid JSON: {_not_utf8(data, error)}"
        raise Refusal(400, said, "", "invalid_json") from error
    except msgspec.DecodeError as error:
        raise Refusal(
            400, f"the request body is not valid JSON: {error}", "", "invalid_json"
        ) from error


def _not_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    """Returns where the text of a body is not UTF-8, counted from its beginning; the decoder counts within a string."""
    try:
        data.decode()
    except UnicodeDecodeError as first:
        error = first
    return f"byte {error.start} is not UTF-8"


def decoded(data: bytes, kind: type[T]) -> T:
    """Returns a JSON body as a structure of the type `kind`. Lone surrogates, which JavaScript makes where it cuts a
    text, become U+FFFD, and what fits no field is read as clients mean it, see `converted`.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError: the body is not valid JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        whole = whole_pairs(data)
        if whole == data and not isinstance(error, msgspec.ValidationError):
            raise
        found: T = converted(msgspec.json.decode(whole), kind)
        return found


def whole_pairs(data: bytes) -> bytes:
    """Returns a JSON document with each escaped lone surrogate replaced by U+FFFD."""
    if _BACKSLASH in data:
        return data
    plain = data.replace(rb"\\", _BACKSLASH)  # else the second one would seem to begin an escape
    plain = _HIGH_ALONE.sub(rb"\\ufffd", plain)
    return _LOW_ALONE.sub(rb"\\ufffd", plain).replace(_BACKSLASH, rb"\\")


def require_decodable(data: bytes) -> None:
    """Checks the nesting depth and decoded size of a JSON document.

    Raises:
        Refusal: it is nested too deeply, or would take too much memory.
    """
    shape = shape_of(data)
    if shape.depth > DEPTH_MOST:
        said = f"the request body is nested {shape.depth} levels deep; the limit is {DEPTH_MOST}"
        raise Refusal(400, said, "", "nested_too_deep")
    if shape.decoded_bytes + _char_bytes(data) * len(data) > DECODED_BYTES_MOST:
        said = f"the request body has about {shape.values:,} values, over {DECODED_BYTES_MOST >> 20} MiB when decoded"
        raise Refusal(413, said, "", "request_too_large")


def _char_bytes(data: bytes) -> int:
    """Returns the bytes per character that the strings of a JSON document take at most."""
    escaped, ascii = b"\\u" in data, data.isascii()
    if (escaped and _PAIR.search(data)) or (not ascii and _BEYOND_16_BITS.search(data)):
        return 4
    return 1 if ascii and not escaped else 2


def shape_of(data: bytes) -> JsonShape:
    """Returns the depth and decoded size of a JSON document, or upper bounds of both if these are small (`is_small`).
    The result is undefined for input that is not JSON."""
    most = _of_counts(
        data.count(b"[") + data.count(b"{"), {mark: data.count(mark) for mark in _BYTES_OF}
    )
    if most.is_small:
        return most
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in data else data
    deep = level = quoted = 0
    counts = dict.fromkeys(_BYTES_OF, 0)
    for at in range(0, len(plain), _BLOCK_BYTES):
        parts = plain[at : at + _BLOCK_BYTES].split(b'"')
        outside = b"".join(parts[quoted::2])
        quoted ^= (len(parts) - 1) % 2
        for mark in counts:
            counts[mark] += outside.count(mark)
        if outside:
            levels = np.cumsum(_STEPS[np.frombuffer(outside, np.uint8)], dtype=np.int32) + level
            deep, level = max(deep, int(levels.max())), int(levels[-1])
    return _of_counts(deep, counts)


def _of_counts(deep: int, counts: dict[bytes, int]) -> JsonShape:
    taken = sum(_BYTES_OF[mark] * count for mark, count in counts.items())
    return JsonShape(deep, sum(counts.values()), taken)


# The key of a scope under which the guard puts the memory of its body.
RESERVATION = "kt.reservation"
ALL_BYTES = 64 << 20
# The first bytes of each body do not count, so that small requests are accepted while large ones are slow.
FREE_BYTES = 64 << 10


class Bodies:
    """The total size of the request bodies of one server; for its event loop."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    @contextmanager
    def reservation(self) -> Iterator[BodyReservation]:
        """Yields a reservation of memory for one request body; releases it at the end if it was not released before."""
        made = BodyReservation(self)
        try:
            yield made
        finally:
            made.release()


class BodyReservation:
    """The memory reserved for one request body, out of a limit for all."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._taken_bytes = bodies, 0

    def grow(self, size_bytes: int) -> None:
        """Reserves the memory for a request body of which `size_bytes` bytes in all have arrived.

        Raises:
            Refusal: the bodies of all requests would exceed the limit.
        """
        more = max(0, size_bytes - FREE_BYTES) - self._taken_bytes
        if self._bodies.taken_bytes + more > ALL_BYTES:
            said = f"too many request bodies at once: the limit is {ALL_BYTES >> 20} MiB in total, try again later"
            raise Refusal(503, said, "", "busy")
        self._bodies.taken_bytes += more
        self._taken_bytes += more

    def release(self) -> None:
        """Releases the memory that was reserved for the request body; a second call does nothing."""
        self._bodies.taken_bytes -= self._taken_bytes
        self._taken_bytes = 0


# Beyond it not every whole number is a float, so that what was meant is not known.
_EXACT = 2.0**53


_type_of = cache(inspect.type_info)


def _tidied(value: Any, kind: inspect.Type) -> Any:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, dict):
        return _object(value, members)
    if isinstance(value, list):
        return _list(value, members)
    if isinstance(value, float) and _is(inspect.IntType, members):
        exact = value.is_integer() and abs(value) <= _EXACT
        return int(value) if exact and not _is(inspect.FloatType, members) else value
    return value


def _object(value: dict[str, Any], members: tuple[inspect.Type, ...]) -> dict[str, Any]:
    for member in members:
        if isinstance(member, inspect.StructType):
            kinds = {each.encode_name: each.type for each in member.fields}
        elif isinstance(member, inspect.DictType):
            kinds = dict.fromkeys(value, member.value_type)
        else:
            continue
        found = {}
        for name, each in value.items():
            kind = kinds.get(name)
            if kind is None:
                found[name] = each
            elif each is not None or _may_be_null(kind):
                found[name] = _tidied(each, kind)
        return found
    return value


def _list(value: list[Any], members: tuple[inspect.Type, ...]) -> list[Any]:
    for member in members:
        if isinstance(member, inspect.ListType):
            if isinstance(member.item_type, inspect.AnyType):
                return value
            return [_tidied(each, member.item_type) for each in value]
    return value


def _may_be_null(kind: inspect.Type) -> bool:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return _is(inspect.NoneType, members) or _is(inspect.AnyType, members)


def _is(what: type[inspect.Type], members: tuple[inspect.Type, ...]) -> bool:
    return any(isinstance(each, what) for each in members)


def converted(value: Any, kind: type[Any]) -> Any:
    """Returns a decoded JSON value as a structure of the type `kind`; null in fields that cannot be null is left out,
    and whole numbers are integers where fields are integers (2.0 is 2).

    Raises:
        msgspec.ValidationError: a field has the wrong type.
    """
    return msgspec.convert(_tidied(value, _type_of(cast(Hashable, kind))), kind)
