"""What operations over windows of positions are told: those that make a row of each window, and attention over a window
and such rows. And how much such rows take of a page of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from ktcli.native import PAGE_TOKENS
from ktcli.ops.tensors import ceil_to


def paged_elements(dim: int, every: int, multiple: int = 1) -> int:
    """Elements per position of a page's rows [dim], one for each window of `every` that ends in it.

    Args:
        multiple: to which their number is rounded up.
    """
    rows = ceil_to(max(1, PAGE_TOKENS // every), multiple)
    return -(-rows * dim // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class MqaShape:
    """Attention over one key, of a window and of pooled rows; see kt_program_mqa for the exact rule.

    Attributes:
        window: positions that a token sees, its own included.
        every: positions of a window that is one pooled row; 0: there are none.
        context: positions that a sequence may have.
        beside: elements that the layer caches for each position behind the pooled rows: an indexer's keys.
    """

    heads: int
    dim: int
    scale: float
    window: int
    every: int = 0
    context: int = 0
    beside: int = 0

    @property
    def paged(self) -> int:
        """Elements of pooled rows, per position."""
        return paged_elements(self.dim, self.every) if self.every else 0

    @property
    def state_elements(self) -> int:
        """f32 of the window."""
        return ceil_to(self.window * self.dim, 16)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Windows of positions that become one row of `dim` columns each; see kt_program_pool for the exact rule.

    Attributes:
        every: positions of a window.
        overlap: the window before takes part, with columns of its own.
    """

    dim: int
    every: int
    overlap: bool

    @property
    def columns(self) -> int:
        """Of each position's row."""
        return 2 * self.dim if self.overlap else self.dim

    @property
    def state_elements(self) -> int:
        """f32: greatest score, sum of powers and weighted sum, of the open window and of the next."""
        return ceil_to(3 * self.columns, 16)
