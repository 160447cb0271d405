"""The label of a KV page or of a prefix's state, from the engine that computes it to the file that stores it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ktcli.records import dataclass

I32Array = NDArray[np.int32]
U8Array = NDArray[np.uint8]

# fill(memory): copies the bytes of a page or state, by whatever thread; False if they are gone
Fill = Callable[[U8Array], bool]


class PageKind(IntEnum):
    """The kinds of stored records; files contain these numbers."""

    PAGE = 1
    STATE = 2
    WINDOW = 3  # a page of the layers with a window


@dataclass(frozen=True, slots=True)
class PageLabel:
    """The key of a stored page or state: the prefix that it belongs to.

    Attributes:
        key: the content address of the prefix that ends with `ids`.
        previous: that of the prefix before them.
        end: the positions of the whole prefix.
        ids: the ids after the last full page of the prefix, or of its last page, [n], at most 64.
        depths: the depth of deferral with which each was computed, [n].
    """

    kind: PageKind
    key: bytes
    previous: bytes
    end: int
    ids: I32Array
    depths: U8Array
