"""Rows of the table for attention over cached positions, and for the choice of these positions."""

from dataclasses import KW_ONLY
from typing import Any

from ktcli.native import PAGE_TOKENS
from ktcli.ops.operation import (
    Cached,
    FieldKind,
    Implied,
    LastChoice,
    Matrix,
    Operation,
    PagesAndStateOf,
    PagesOf,
    Rows,
    StateFirst,
    Vector,
    Widths,
)
from ktcli.ops.tensors import ceil_to
from ktcli.records import dataclass


def paged_elements(dim: int, every: int, multiple: int = 1) -> int:
    """Returns the number of elements cached per position, rounded up, if a page of 64 positions holds one row of `dim`
    columns for each window of `every` positions that ends in it, and at least one row.

    Args:
        multiple: the rows of a page are rounded up to a multiple of this.
    """
    rows = ceil_to(max(1, PAGE_TOKENS // every), multiple)
    return -(-rows * dim // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class GqaShape:
    """The sizes and constants of one layer's grouped-query attention.

    Attributes:
        window: positions that a token sees, its own included; 0: all before it.
        beside: elements that the layer caches for each position behind k and v: an indexer's key.
        v: columns of a head's values; 0: as many as of its keys. Read `value_dim`.
        chunked: whether a token sees the positions from the last multiple of `window` on (Llama 4), instead of always
            as many.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    beside: Implied = 0
    v: int = 0
    chunked: bool = False

    def first_seen(self, position: Any) -> Any:
        """Returns the first position that a token at `position` (an integer or a tensor) attends to; with a window that
        is not chunked it may be below 0.
        """
        if self.chunked:
            return position - position % self.window
        return position + 1 - self.window if self.window else position * 0

    @property
    def value_dim(self) -> int:
        """The number of columns of each head's values, and of its attention result."""
        return self.v or self.head_dim

    @property
    def kept(self) -> int:
        """The number of elements of the keys and values of all heads for one position."""
        return self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Gqa(Operation):
    """Appends k and v to the cache and attends causally -> [T, heads * value_dim].

    With `chosen` it attends to the blocks that the last `choose` selected for each of kv_heads.
    sinks [heads] add one score to the softmax of each head, which belongs to no key."""

    name = "gqa"
    reads_step = True

    q: Rows
    k: Rows
    v: Rows
    shape: GqaShape
    _: KW_ONLY
    layer: PagesOf
    sinks: Vector | None = None
    chosen: LastChoice = False

    @property
    def cached(self) -> Cached:
        """What is cached for each position: `parts` are the elements of the keys and of the values of all heads,
        `heads` the number of heads of each; `behind` are the `shape.beside` elements of an indexer, `before` is 0.
        """
        s = self.shape
        parts = s.kv_heads * s.head_dim, s.kv_heads * s.value_dim
        return Cached(0, parts, s.beside, (s.kv_heads, s.kv_heads))

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, q, k and v, and the number of sinks."""
        s, (k, v) = self.shape, self.cached.parts
        out = s.heads * s.value_dim
        return {"out": out, "q": s.heads * s.head_dim, "k": k, "v": v, "sinks": s.heads}


@dataclass(frozen=True, slots=True)
class ChooseShape:
    """The sizes and constants of the selection of positions that a token attends to; see kt_program_choose for the
    exact rule.

    Attributes:
        heads, dim: number and width of the index queries; the one index key has `dim` columns, too.
        top_k: the number of places chosen for a token.
        scale: the factor of the scores, positive.
        behind: elements that the layer caches for each position before the index key.
        block: the number of positions of a place.
        local: the number of blocks that are always chosen: the token's own and those before it.
        every: the number of positions of a window that is a place; its key is that of its last position.
    """

    heads: int
    dim: int
    top_k: int
    scale: float
    behind: Implied
    block: int = 1
    local: int = 0
    every: int = 1

    @property
    def positions(self) -> int:
        """The greatest number of positions that are chosen for a token to attend to."""
        return self.top_k * self.block * self.every

    @property
    def elements(self) -> int:
        """The number of elements of index keys that are cached for each position."""
        return paged_elements(self.dim, self.every, 16)

    @property
    def partials(self) -> int:
        """The number of f32 elements of scratch that scoring all places of one page takes for one token: per place
        `dim` for its key, and 5 per head for scores and sorting.
        """
        return max(1, PAGE_TOKENS // self.every) * (self.dim + 5 * self.heads)


@dataclass(frozen=True, slots=True)
class Choose(Operation):
    """Appends the index key [T, dim] and chooses the positions that each token attends to by the index queries [T,
    heads * dim] and their weights [T, heads]; without weights each head chooses blocks for itself. The chosen
    positions hold until the next `choose`."""

    name = "choose"
    outs = ()
    gives = (FieldKind.CHOICE,)
    reads_step = True

    q: Rows
    key: Rows
    weight: Rows | None
    shape: ChooseShape
    _: KW_ONLY
    layer: PagesOf

    @property
    def cached(self) -> Cached:
        """What is cached for each position: one part, the `shape.elements` elements of the index key, after `before` =
        `shape.behind` elements of other operations; `behind` is 0, `heads` ().
        """
        return Cached(self.shape.behind, (self.shape.elements,), 0)

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the index queries `q`, the index key `key` and the `weight`
        of heads.
        """
        s = self.shape
        return {"q": s.heads * s.dim, "key": s.dim, "weight": s.heads}


@dataclass(frozen=True, slots=True)
class MlaShape:
    """The sizes and constants of one layer's multi-head latent attention: widths per head, and of the latent.

    Attributes:
        beside: elements that the layer caches for each position behind the latent: an indexer's key.
    """

    heads: int
    nope: int
    rope: int
    v: int
    lora: int
    scale: float
    beside: Implied = 0

    @property
    def cached_heads(self) -> int:
        """The number of heads cached for each position, with a scale each in an fp8 cache: one of the latent, and one
        of the rotated columns, if any.
        """
        return 2 if self.rope else 1


@dataclass(frozen=True, slots=True)
class Mla(Operation):
    """Appends the latent [T, lora + rope] to the cache and attends causally -> [T, heads * v].

    The weights have one matrix per head: uk_in (query to latent), uk_out (latent to key), uv (latent to value).
    With `chosen` it attends to what the last `choose` selected."""

    name = "mla"
    reads_step = True

    q: Rows
    latent: Rows
    uk_in: Matrix
    uk_out: Matrix
    uv: Matrix
    shape: MlaShape
    _: KW_ONLY
    layer: PagesOf
    chosen: LastChoice = False

    @property
    def cached(self) -> Cached:
        """What is cached for each position: one part, the lora + rope elements of the latent and the rotated key, with
        `shape.cached_heads` heads; `behind` are the `shape.beside` elements of an indexer, `before` is 0.
        """
        s = self.shape
        return Cached(0, (s.lora + s.rope,), s.beside, (s.cached_heads,))

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, q and the latent, and the (heads, n, k)
        of the weights.
        """
        s = self.shape
        return {
            "out": s.heads * s.v,
            "q": s.heads * (s.nope + s.rope),
            "latent": s.lora + s.rope,
            "uk_in": (s.heads, s.lora, s.nope),
            "uk_out": (s.heads, s.nope, s.lora),
            "uv": (s.heads, s.v, s.lora),
        }


@dataclass(frozen=True, slots=True)
class MqaShape:
    """The sizes and constants of multi-query attention whose key is its value, over a window and pooled rows; see
    kt_program_mqa for the exact rule.

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
    beside: Implied = 0

    @property
    def paged(self) -> int:
        """The number of elements of pooled rows that are cached for each position, rounded up: a row of `dim` elements
        for each window of `every` positions; 0 if `every` is 0: there are no pooled rows.
        """
        return paged_elements(self.dim, self.every) if self.every else 0

    @property
    def partials(self) -> int:
        """The number of f32 elements of scratch that one token's attention to all pooled rows of one page takes: per
        row 3 * dim for copies of it, and 2 per head for its scores; 0: there are no pooled rows.
        """
        if not self.every:
            return 0
        return max(1, PAGE_TOKENS // self.every) * (3 * self.dim + 2 * self.heads)

    @property
    def state_elements(self) -> int:
        """The number of f32 elements of a sequence's state in the layer: the keys of the last `window` positions,
        rounded up to a multiple of 16.
        """
        return ceil_to(self.window * self.dim, 16)


@dataclass(frozen=True, slots=True)
class Mqa(Operation):
    """Appends the pooled rows to the cache and attends to them and the last positions -> [T, heads * dim].

    With `chosen` it attends to those pooled rows that the last `choose` selected.
    Its state begins with f32 element `first` of the layer's, a multiple of 16."""

    name = "mqa"
    reads_step = True

    q: Rows
    kv: Rows
    pooled: Rows | None
    shape: MqaShape
    _: KW_ONLY
    layer: PagesAndStateOf
    first: StateFirst
    sinks: Vector | None = None
    chosen: LastChoice = False

    @property
    def cached(self) -> Cached:
        """What is cached for each position: one part, the `shape.paged` elements of pooled rows; `behind` are the
        `shape.beside` elements of an indexer, `before` is 0, `heads` ()."""
        return Cached(0, (self.shape.paged,), self.shape.beside)

    def widths(self) -> Widths:
        """Returns, by field name, the numbers of columns of the result `out`, q, kv and the pooled rows, and the number
        of sinks.
        """
        s, width = self.shape, self.shape.heads * self.shape.dim
        pooled = s.dim if s.every else 0
        return {"out": width, "q": width, "kv": s.dim, "pooled": pooled, "sinks": s.heads}
