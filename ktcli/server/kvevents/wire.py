"""The events of KV blocks as vLLM sends them: MessagePack maps in which every key is present."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ktcli.native import PAGE_TOKENS

_RANK = 0  # of the server among those that share one model's requests
_ENCODER = msgspec.msgpack.Encoder()


class BlockStored(msgspec.Struct, tag=True):
    """A block has come.

    Attributes:
        block_hashes: its hash, see `blockhash`.
        parent_block_hash: that of the block before; None: it is the first.
        medium: where it is: GPU, CPU or DISK.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    medium: str
    block_size: int = PAGE_TOKENS
    lora_id: int | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """A block has gone from a medium."""

    block_hashes: list[bytes]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks have gone, from every medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def packed(events: Sequence[Event], now: float) -> bytes:
    """Returns the payload of a message.

    Args:
        now: the time, in seconds since 1970.
    """
    return _ENCODER.encode((now, events, _RANK))
