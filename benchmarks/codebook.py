"""How the 16 values of the `nl4` formats were found: Lloyd's algorithm under the encoder's own scale search.

Weights of a trained model are near Gaussian with heavier tails the more its rows and columns differ, so the
sample is a third Gaussian, a third Student t with 5 degrees of freedom, a third Gaussian with columns of
log-normal size (sigma 1/2), in groups of 32 and of 64. In turn every group gets its best scale, found as the
encoder finds it, and every value becomes the mean of the weights that chose it, weighted by the square of
their scale, which is what their errors count. One value stays 0, so that zeros stay zeros; that costs nothing.
At the end the values are rounded to integers of at most 127: dot products read them as int8. The spacing is
not symmetric: scales carry a sign, so each group lies the better way round.

Prints the row, and the relative errors beside those of the linear codebook. Takes half a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import oracle  # type: ignore[import-not-found]

from ktcli.native import Format, Scale
from ktcli.weights.formats import FORMATS, LINEAR

F32 = NDArray[np.float32]
KINDS = ("gauss", "t5", "columns")
ELEMENTS = 128_000
ROUNDS = 25
ZERO = 8  # the place of the value that stays 0
START = np.sinh(np.linspace(-2, 1.75, 16))


def sample(kind: str, group: int, seed: int) -> F32:
    """Groups [ELEMENTS / group, group]."""
    draw = np.random.default_rng(seed)
    shape = (ELEMENTS // group, group)
    if kind == "t5":
        return draw.standard_t(5, shape).astype(np.float32)
    size = draw.lognormal(0, 0.5, shape) if kind == "columns" else 1.0
    return (draw.standard_normal(shape) * size).astype(np.float32)


def fit(x: F32, book: NDArray[np.float64]) -> tuple[NDArray[np.int64], F32]:
    """Indices of each weight, and the scale of each group, that the encoder's search finds."""
    middles = (book[1:] + book[:-1]) / 2
    high, low = x.max(1), x.min(1)
    most = np.where(high >= -low, high, low)
    best, chosen = np.full(len(x), np.inf), np.zeros(len(x))
    for factor in oracle.FACTORS:
        for end in (book[0], book[-1]):
            scale = most / (end * factor)
            means = book[np.searchsorted(middles, x / scale[:, None])]
            error = ((x - means * scale[:, None]) ** 2).sum(1)
            better = error < best
            best, chosen = np.where(better, error, best), np.where(better, scale, chosen)
    return np.searchsorted(middles, x / chosen[:, None]), chosen.astype(np.float32)


def derive() -> tuple[int, ...]:
    """The codebook."""
    samples = [sample(kind, group, 1) for kind in KINDS for group in (32, 64)]
    book = START / np.abs(START).max() * 127
    for _ in range(ROUNDS):
        above, below = np.zeros(16), np.zeros(16)
        for x in samples:
            index, scale = fit(x, book)
            share = 1 / float((x**2).sum())
            sizes = np.broadcast_to(scale[:, None] ** 2, x.shape)
            above += share * np.bincount(index.ravel(), (x * scale[:, None]).ravel(), 16)
            below += share * np.bincount(index.ravel(), sizes.ravel(), 16)
        book = above / below
        book[ZERO] = 0
        book *= 127 / np.abs(book).max()
    return tuple(int(value) for value in np.rint(book))


def error_percent(fmt: Format, x: F32) -> float:
    """Relative rms error of groups x [n, group]."""
    back = oracle.decode(fmt, *oracle.encode(fmt, x))
    return 100 * float(np.sqrt(((back - x) ** 2).sum() / (x**2).sum()))


def main() -> None:
    """Derive, compare, print."""
    found = derive()
    print(found, "is the row" if found == FORMATS["nl4"].codebook else "DIFFERS from the row")
    for name, book in (("linear", LINEAR), ("nl4", found)):
        for group in (32, 64):
            fmt = Format(name, bits=4, group=group, scale=Scale.BF16, codebook=book)
            errors = (f"{kind} {error_percent(fmt, sample(kind, group, 2)):.2f}" for kind in KINDS)
            print(f"{name:6} group {group}: error in % of the weights' size: {', '.join(errors)}")


if __name__ == "__main__":
    main()
