"""Reads the bodies of requests: JSON of a bounded depth, as a structure whose fields are checked."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import Request

from ktcli.server.refusal import Refusal

T = TypeVar("T")
DEPTH_MOST = 64  # of arrays and objects in each other; what agents send has about 15
_LARGE_BYTES = 1 << 18  # that are looked at on another thread
_BLOCK_BYTES = 1 << 20
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1

_BACKSLASH = b"\0\1"  # in the place of an escaped one: no JSON text has these bytes
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HIGH_ALONE, _LOW_ALONE = (
    re.compile(_HIGH + b"(?!%b)" % _LOW),
    re.compile(b"(?<!%b)%b" % (_HIGH, _LOW)),
)


async def body_of(request: Request, kind: type[T]) -> T:
    """The body of a request.

    Raises:
        Refusal: it is no JSON of this kind, the field is named; or it is nested too deep.
    """
    data = await request.body()
    if len(data) > _LARGE_BYTES:
        deep = await asyncio.to_thread(depth, data)
    else:
        deep = depth(data)
    if deep > DEPTH_MOST:
        said = f"the request is nested {deep} deep, {DEPTH_MOST} is the most"
        raise Refusal(400, said, "", "nested_too_deep")
    try:
        return _decoded(data, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".")
        raise Refusal(400, f"{field or 'the request'}: {what}", field, "invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the request is no JSON: {error}", "", "invalid_json") from error


def _decoded(data: bytes, kind: type[T]) -> T:
    """Decodes a body; one that has halves of surrogate pairs, which JavaScript makes where it cuts a text, is decoded
    with U+FFFD in their places."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError) or (whole := whole_pairs(data)) == data:
            raise
        return msgspec.json.decode(whole, type=kind)


def whole_pairs(data: bytes) -> bytes:
    """A JSON text with U+FFFD for each escaped half of a surrogate pair that has no other half beside it."""
    plain = data.replace(rb"\\", _BACKSLASH)  # else the second one would seem to begin an escape
    plain = _HIGH_ALONE.sub(rb"\\ufffd", plain)
    return _LOW_ALONE.sub(rb"\\ufffd", plain).replace(_BACKSLASH, rb"\\")


def depth(data: bytes) -> int:
    """How deep the arrays and objects of a JSON text are in each other; of another text any number.

    It is known before anything is decoded, at about 1 ns a byte, and takes memory for 1 MiB at a time.
    """
    if (brackets := data.count(b"[") + data.count(b"{")) <= DEPTH_MOST:
        return brackets
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in data else data
    most = level = quoted = 0
    for at in range(0, len(plain), _BLOCK_BYTES):
        parts = plain[at : at + _BLOCK_BYTES].split(b'"')
        outside = np.frombuffer(b"".join(parts[quoted::2]), np.uint8)
        quoted ^= (len(parts) - 1) % 2
        if outside.size:
            levels = np.cumsum(_STEPS[outside], dtype=np.int32) + level
            most, level = max(most, int(levels.max())), int(levels[-1])
    return most
