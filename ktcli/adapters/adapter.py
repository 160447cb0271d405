"""An adapter as the rest of kt sees it: the rows of stored tensors that it changes, and the products that change
them.

Nothing here depends on how its files are laid out. Kernels, merging and export read `LowRank` and `LoraPair`; `folder`
makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ktcli.adapters.factors import F32, Factor, decoded, hash_of
from ktcli.adapters.settings import AdapterSettings
from ktcli.adapters.targets import LoraTarget, Rows, TargetPiece
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass
from ktcli.weights.files import OpenFiles
from ktcli.weights.storage import Part, Raw

N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The update of one target as its author trained it: each of `count` matrices
    W [n, k] becomes W + scale · B A.

    Attributes:
        module: the module's name in the adapter, which need not be that of the target.
        a: [count, r, k]. b: [count, n, r].
        alpha: what `scale` was made of.
    """

    target: LoraTarget
    module: str
    a: Factor
    b: Factor
    alpha: float
    scale: float

    @property
    def rank(self) -> int:
        """The LoRA rank r of the update: the rows of each matrix A, and the columns of each matrix B."""
        return self.a.shape[1]

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the factors A and B take in the adapter's files."""
        return self.a.size_bytes + self.b.size_bytes

    @property
    def dtype(self) -> str:
        """The number type of the factors A and B in the adapter's files: "F32", "F16" or "BF16"; "F32" if the two
        differ.
        """
        return self.a.dtype if self.a.dtype == self.b.dtype else "F32"


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The update of rows of one stored tensor: for matrix i of `tensor`, and its input x [T, k],

        y[:, rows] += scale · (x @ a[i].T) @ b[i].T        a [count, r, k], b [count, m, r], f32, from `Adapter.factors`

    with `count` = tensor.count (experts, or the heads of MLA's split kv_b) and `rows` [m] the columns of y: rows of a
    matrix of `tensor` as it is stored, where gate and up alternate in panels of 16 and padding has no row. One tensor
    may have several updates: those of q, k and v, or of gate and up where each has an A of its own; a fused gate_up has
    one, whose A is read once for both. x is the input of the product as published: where a conversion moved factors of
    the columns into `tensor.gain` (`weights.columns`), a is to be divided by them.

    Attributes:
        rows: [m] int32, each row at most once.
        pair: where its numbers are.
        taken: the rows of the pair's B that belong to `rows`: [m], or [count, m] where each matrix has others (heads).
        flipped: whether `tensor` holds the transpose of rows of the target (kv_b's keys as they are read): then `taken`
            says which columns of x they are, and A and B change places.
    """

    tensor: Tensor
    rows: Rows
    pair: LoraPair
    taken: Rows
    flipped: bool = False

    @property
    def scale(self) -> float:
        """The factor that multiplies the product of B and A when it is added to the weights."""
        return self.pair.scale

    @property
    def rank(self) -> int:
        """The LoRA rank r of the update: the rows of each matrix a, and the columns of each matrix b."""
        return self.pair.rank

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of the factors a and b: (count, r, k) and (count, m, r), for `count` stored matrices with k
        inputs, of which m rows change, and the LoRA rank r.
        """
        count, r = self.tensor.count, self.rank
        return (count, r, self.tensor.k), (count, len(self.rows), r)


@dataclass(frozen=True, slots=True)
class NewGain:
    """A norm's gain that the adapter replaces (`modules_to_save`).

    Attributes:
        tensor: the stored vector [k].
        part: its values in the files, [k], without what `tensor` adds to them.
    """

    tensor: Tensor
    module: str
    part: Part


@dataclass(frozen=True)
class Adapter:
    """An open adapter, checked against a model. Close it, or use it in a `with` statement.

    Attributes:
        tensors: those of the model.
        pairs: by target, in the order of these.
        files: the adapter's open files, from which values are read when asked for.
        folder: where they lie. names: all of its files.
        notes: sentences for the user about what its author may not have meant.
        hashes: the SHA-256 of files that is known already, by name.
    """

    settings: AdapterSettings
    tensors: tuple[Tensor, ...]
    pairs: tuple[LoraPair, ...]
    gains: tuple[NewGain, ...]
    files: OpenFiles
    folder: Path
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the adapter's files."""
        self.files.close()

    @cached_property
    def updates(self) -> tuple[LowRank, ...]:
        """The low-rank updates of the model's stored tensors, in the order of `pairs`; a pair whose target is stored in
        several tensors has one for each.
        """
        return tuple(each for pair in self.pairs for each in updates_of(pair))

    def values(self, pair: LoraPair) -> tuple[F32, F32]:
        """Returns the LoRA factors A [count, r, k] and B [count, n, r], f32, of a target with `count` matrices [n, k]
        and LoRA rank r, read from the files.

        Raises:
            BadCheckpoint: a number is NaN or Inf, or a file cannot be read.
        """
        return pair.a.values(self.files), pair.b.values(self.files)

    def factors(self, update: LowRank) -> tuple[F32, F32]:
        """Returns the factors a [count, r, k] and b [count, m, r], f32, of an update (see `LowRank`), read from the
        files; either may be a view that repeats one matrix.

        Raises:
            BadCheckpoint: a number is NaN or Inf, or a file cannot be read.
        """
        return placed(update, *self.values(update.pair))

    def stored(self, update: LowRank, room: Raw) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the factors a and b of a stored tensor's update in the shapes of `factors`, but in the number type of
        the files: float32, float16, or uint16 with the bits of bf16.

        Args:
            room: at least `update.pair.size_bytes` bytes, into which the factors are read; the results are mostly views
                of it.
        Raises:
            BadCheckpoint: a file cannot be read, or a factor whose tensors have several types has a NaN or Inf.
        """
        a, b = update.pair.a, update.pair.b
        stored = (
            a.stored(self.files, room[: a.size_bytes]),
            b.stored(self.files, room[a.size_bytes :]),
        )
        return placed(update, *stored)

    def gain(self, gain: NewGain) -> F32:
        """Returns the weights [k] that the adapter gives a norm, f32, as a checkpoint has them: without the constant
        that some models add to them.

        Raises:
            BadCheckpoint: a number is NaN or Inf, or the file cannot be read.
        """
        return decoded(gain.part, self.files)

    @cached_property
    def digest(self) -> str:
        """The SHA-256, hexadecimal, over the names and hashes of all of the adapter's files; those that `hashes` does
        not name are read in full.
        """
        return combined(
            (name, self.hashes.get(name) or hash_of(self.folder / name)) for name in self.names
        )

    @property
    def size_bytes(self) -> int:
        """The number of bytes that the adapter's LoRA factors and norm gains take in its files."""
        gains = sum(each.part.entry.size_bytes for each in self.gains)
        return gains + sum(pair.size_bytes for pair in self.pairs)

    @property
    def parts(self) -> dict[ModelPart, list[LoraPair]]:
        """The adapter's LoRA pairs (A and B of one target) as {part of the model that the target belongs to: its
        pairs}, in the order of `pairs`.
        """
        found: dict[ModelPart, list[LoraPair]] = {}
        for pair in self.pairs:
            found.setdefault(pair.target.part, []).append(pair)
        return found


def combined(hashes: Iterable[tuple[str, str]]) -> str:
    """Returns the digest of an adapter, hexadecimal: the SHA-256 over the names and the SHA-256 of its files.

    Args:
        hashes: (name, SHA-256) of each file, in the order of `folder.FILES`.
    """
    state = sha256()
    for name, found in hashes:
        state.update(f"{name} {found}\n".encode())
    return state.hexdigest()


def updates_of(pair: LoraPair) -> Iterator[LowRank]:
    """Yields the low-rank updates of the model's stored tensors that the LoRA pair of one target amounts to, one for
    each tensor that holds rows of the target; no number is read from the files.
    """

    def key(piece: TargetPiece) -> tuple[str, bool]:
        return piece.tensor.name, piece.stored.transposed

    for _, group in groupby(sorted(pair.target.pieces, key=key), key):
        pieces = list(group)
        first = pieces[0]
        if first.stored.band is not None:
            yield _of_heads(pair, first)
            continue
        rows = np.concatenate([piece.rows for piece in pieces])
        taken = np.concatenate([chosen_rows(piece) for piece in pieces])
        yield LowRank(first.tensor, rows, pair, taken)


def chosen_rows(piece: TargetPiece) -> Rows:
    """Returns, for each row of a stored tensor that a piece describes, in the order of `piece.rows`, the number of that
    row in the target's own matrix, int32.
    """
    stored = piece.stored
    stop = stored.first + stored.rows * stored.step
    return np.arange(stored.first, stop, stored.step, dtype=np.int32)


def _of_heads(pair: LoraPair, piece: TargetPiece) -> LowRank:
    """The update of a tensor whose matrices are bands of the target's rows, or the transposes of these."""
    stored, tensor = piece.stored, piece.tensor
    band = stored.band
    assert band is not None
    heads = np.arange(tensor.count)[:, None] * band.stride + band.first
    taken = (heads + np.arange(band.rows)).astype(np.int32)
    rows = np.arange(tensor.n, dtype=np.int32)
    return LowRank(tensor, rows, pair, taken, flipped=stored.transposed)


def placed(update: LowRank, a: NDArray[N], b: NDArray[N]) -> tuple[NDArray[N], NDArray[N]]:
    """Returns the factors a [count, r, k] and b [count, m, r] of an update (see `LowRank`), selected from A and B of
    its LoRA pair; mostly as views.

    Args:
        a: A of the pair, [1 or count, r, k of the target].
        b: B of the pair, [1 or count, n of the target, r].
    """
    count = update.tensor.count
    if update.taken.ndim == 1:
        chosen = b[:, _range_of(update.taken)]
    else:
        chosen = b[0][update.taken]  # [heads, band, r]
    if len(a) != count:
        a = np.broadcast_to(a, (count, *a.shape[1:]))
    if update.flipped:
        return chosen.swapaxes(1, 2), a.swapaxes(1, 2)
    return a, chosen


def _range_of(rows: Rows) -> Rows | slice:
    """Rows as a slice where they follow each other: what it chooses is not copied."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    return slice(first, last) if np.array_equal(rows, np.arange(first, last)) else rows
