"""Knows the blocks that a server holds, and makes the events of what changes.

A page is announced if the chain of pages before it begins with nothing, computed for callers who name no salt and no
adapter: no other page can be found by the ids alone, and nobody else is told what it holds. Two pages whose ids are the
same, but which were computed in different ways, are one block.

Blocks are hashed as vLLM does with `sha256_cbor`, so that routers know them by the same names everywhere. The hash of a
block is the SHA-256 of the canonical CBOR of (hash of the block before, its ids, None); before the first block comes
the hash of a text, which vLLM takes from the variable PYTHONHASHSEED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import field
from hashlib import sha256

import numpy as np

from ktcli.engine.prefix import chain
from ktcli.pagelabel import I32Array
from ktcli.records import dataclass
from ktcli.server.kvevents.changes import Came, PageChangeSet, PagePlace, StoredPage
from ktcli.server.kvevents.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from ktcli.store.pagefile import Damaged, read_ids


@dataclass(slots=True)
class _Block:
    """A page that is announced.

    Attributes:
        parent: the hash of the block before; None: it is the first.
        end: the positions of its whole prefix.
        media: where it is.
    """

    hash: bytes
    parent: bytes | None
    ids: I32Array
    end: int
    media: set[str] = field(default_factory=set)

    def stored(self, medium: str) -> BlockStored:
        return BlockStored([self.hash], self.parent, self.ids.tolist(), medium)


class BlockBook:
    """The blocks that are announced.

    Args:
        seed: the text from which the first block's hash is made, see `root_hash`.
    """

    def __init__(self, seed: str) -> None:
        self._before_all = root_hash(seed)
        self._root: bytes | None = None
        self._blocks: dict[bytes, _Block] = {}  # by the keys of pages
        self._pages: Counter[tuple[bytes, str]] = Counter()  # of a hash in a medium

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, taken: PageChangeSet) -> Iterator[Event]:
        """Yields the events that tell subscribers of these changes of KV pages: first that all are gone if the model
        changed or changes were lost, then additions, each block after its predecessor, then removals."""
        if taken.begins or taken.lost:
            self._root = taken.root
            self._blocks.clear()
            self._pages.clear()
            yield AllBlocksCleared()
        came = [(place, each) for place, each in taken.pages.items() if each is not None]
        for place, what in sorted(came, key=lambda pair: _end(pair[1])):
            yield from self._come(place, what)
        for place, each in taken.pages.items():
            if each is None:
                yield from self._go(place)

    def all(self) -> Iterator[Event]:
        """Yields an `AllBlocksCleared`, then the events that describe all blocks that can be found by way of their
        predecessors, each block after these."""
        yield AllBlocksCleared()
        known: set[bytes | None] = {None}
        told = set[tuple[bytes, str]]()
        for block in sorted(self._blocks.values(), key=lambda block: block.end):
            if block.parent in known:  # otherwise nothing can be found by way of it
                known.add(block.hash)
                for medium in sorted(block.media):
                    if (block.hash, medium) not in told:
                        told.add((block.hash, medium))
                        yield block.stored(medium)

    def _come(self, place: PagePlace, what: Came) -> Iterator[Event]:
        block = self._blocks.get(place.key) or self._made(what)
        if block is None or place.medium in block.media:
            return
        self._blocks[place.key] = block
        block.media.add(place.medium)
        self._pages[block.hash, place.medium] += 1
        if self._pages[block.hash, place.medium] == 1:
            yield block.stored(place.medium)

    def _go(self, place: PagePlace) -> Iterator[Event]:
        block = self._blocks.get(place.key)
        if block is None or place.medium not in block.media:
            return
        block.media.discard(place.medium)
        if not block.media:
            del self._blocks[place.key]
        self._pages[block.hash, place.medium] -= 1
        if not self._pages[block.hash, place.medium]:
            del self._pages[block.hash, place.medium]
            yield BlockRemoved([block.hash], place.medium)

    def _made(self, what: Came) -> _Block | None:
        """The block of a page; None: the pages before it are not announced, or its file is gone."""
        label = what.entry if isinstance(what, StoredPage) else what
        before = self._blocks.get(label.previous)
        if before is None and label.previous != self._root:
            return None
        ids = _ids(what)
        if ids is None:
            return None
        parent = None if before is None else before.hash
        made = block_hash(parent or self._before_all, ids.tolist())
        return _Block(made, parent, ids, label.end)


def _end(what: Came) -> int:
    return what.entry.end if isinstance(what, StoredPage) else what.end


def _ids(what: Came) -> I32Array | None:
    """The ids of a page; None: they cannot be read, or are not those of its key."""
    if not isinstance(what, StoredPage):
        return what.ids
    with suppress(OSError, Damaged):
        ids, depths = read_ids(what.path, what.entry)
        if chain(what.entry.previous, ids, depths) == what.entry.key and np.all(ids >= 0):
            return ids
    return None


DEFAULT_SEED = "0"
# The types of CBOR's data items, in the upper three bits of their first byte.
_NUMBER, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NULL = b"\xf6"
_WIDTHS = ((1 << 8, 24, 1), (1 << 16, 25, 2), (1 << 32, 26, 4), (1 << 64, 27, 8))
_SMALL = 24  # numbers below are in the first byte itself


def root_hash(seed: str) -> bytes:
    """Returns the hash that is the parent of the first block of a sequence: the SHA-256, 32 bytes, of the seed in
    CBOR."""
    text = seed.encode()
    return sha256(_head(_TEXT, len(text)) + text).digest()


def block_hash(parent: bytes, ids: Iterable[int]) -> bytes:
    """Returns the hash of a block of KV positions: the SHA-256, 32 bytes, of its parent's hash and its token ids in
    CBOR.

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
