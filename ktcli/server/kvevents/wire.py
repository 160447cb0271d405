"""The events of KV blocks as vLLM sends them: MessagePack maps in which every key is present, and hashes as numbers of
64 bits, as vLLM has them unless told otherwise. Dynamo reads no others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ktcli.native import PAGE_TOKENS

_RANK = 0  # of the server among those that share one model's requests
_NUMBER_BYTES = 8  # the last ones of a hash
_ENCODER = msgspec.msgpack.Encoder()


class BlockStored(msgspec.Struct, tag=True):
    """The event that a block can be found.

    Attributes:
        block_hashes: its hash, see `block_hash`.
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
    """The event that no block can be found any more, in any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def packed(events: Sequence[Event], now: float) -> bytes:
    """Returns the payload of a message that publishes events: the MessagePack of [time, events, rank], where the rank
    is 0.

    Args:
        now: the time, in seconds since 1970.
    """
    return _ENCODER.encode((now, [_with_numbers(each) for each in events], _RANK))


def number_of(hash_: bytes) -> int:
    """Returns the number that stands for a block's hash in events: its last 64 bits."""
    return int.from_bytes(hash_[-_NUMBER_BYTES:], "big")


def _with_numbers(event: Event) -> dict[str, object]:
    """The map of an event."""
    made: dict[str, object] = msgspec.to_builtins(event, builtin_types=(bytes,))
    if not isinstance(event, AllBlocksCleared):
        made["block_hashes"] = [number_of(each) for each in event.block_hashes]
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        made["parent_block_hash"] = number_of(event.parent_block_hash)
    return made
