"""Hashes blocks of tokens as vLLM does with `sha256_cbor`, so that routers know them by the same names everywhere.

The hash of a block is the SHA-256 of the canonical CBOR of (hash of the block before, its ids, None); before the first
block comes the hash of a text, which vLLM takes from the variable PYTHONHASHSEED.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

DEFAULT_SEED = "0"
# The types of CBOR's data items, in the upper three bits of their first byte.
_NUMBER, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NULL = b"\xf6"
_WIDTHS = ((1 << 8, 24, 1), (1 << 16, 25, 2), (1 << 32, 26, 4), (1 << 64, 27, 8))
_SMALL = 24  # numbers below are in the first byte itself


def root_hash(seed: str) -> bytes:
    """Returns the parent hash of the first block."""
    text = seed.encode()
    return sha256(_head(_TEXT, len(text)) + text).digest()


def block_hash(parent: bytes, ids: Iterable[int]) -> bytes:
    """Returns the hash of a block.

    Args:
        parent: the hash of the block before.
        ids: of its tokens.
    """
    numbers = [_head(_NUMBER, each) for each in ids]
    block = b"".join((_head(_ARRAY, len(numbers)), *numbers))
    before = _head(_BYTES, len(parent)) + parent
    return sha256(_head(_ARRAY, 3) + before + block + _NULL).digest()


def _head(kind: int, n: int) -> bytes:
    """The shortest beginning of a data item with the number `n`: its value, or its length."""
    if n < _SMALL:
        return bytes((kind | n,))
    for most, code, width in _WIDTHS:
        if n < most:
            return bytes((kind | code,)) + n.to_bytes(width, "big")
    raise OverflowError(n)
