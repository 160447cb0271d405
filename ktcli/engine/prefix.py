"""Content addresses of pages: a chain of hashes over the ids of a sequence, from a seed that identifies who computed
them.

Two pages have the same key only if the ids of all positions up to their last are the same, each was computed in the
same way (forms.py), and everything else that changes the bytes of a page is the same: that is in the seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ktcli.models import Model
from ktcli.pagelabel import PageKind, PageLabel
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe

VERSION = 1  # of what a key means, and of the layout of pages

Ids = NDArray[np.int32]
Depths = NDArray[np.uint8]  # how each id was computed, see `forms`


def seed(facts: Mapping[str, object]) -> bytes:
    """Returns the key of the empty prefix, 32 bytes: the SHA-256 of all facts that change the bytes of KV-cache pages.
    Their values are numbers, texts, and lists and mappings of these.
    """
    text = json.dumps({"kt_pages": VERSION, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def facts_of(model: Model, recipe: Recipe, weights: str) -> dict[str, object]:
    """Returns the facts that change the bytes of KV-cache pages on every engine, a JSON-like mapping for `seed`:
    "weights", "formats" (a list of names), "model" (a SHA-256 of its description) and, where they apply, "forms",
    "queries", "activations" and "rotations" (variants of how they are computed).

    Args:
        model: at the context that is asked for: rotations can depend on it.
        weights: the identity of their source.
    """
    forms = {"forms": "of positions"} if model.spec.latent else {}  # before, they were of chunks
    fine = (
        recipe.dense.rotation > 0 and recipe.dense.group > 0
    )  # before, queries of some latents read 15 bits
    queries = {"queries": "by group"} if model.spec.latent and fine else {}
    return {
        "weights": weights,
        "formats": [recipe.name, *sorted(part.value for part in recipe.in_f32)],
        # The class was named DecoderModel when the first pages were stored, which are found by this text.
        "model": hashlib.sha256(f"Decoder{model!r}".encode()).hexdigest(),
        **forms,
        **queries,
        **_rounding(recipe),
    }


def _rounding(recipe: Recipe) -> dict[str, object]:
    """What changed in formats whose names stayed: activations had one scale for a row, and int8 no rotation."""
    formats = [each for each in (recipe.experts, recipe.dense, recipe.down) if each]
    grouped = any(each.activation_bits == 8 and each.group for each in formats)
    rotated = any(each.rotation for each in formats)
    return ({"activations": "by group"} if grouped else {}) | (
        {"rotations": [each.rotation for each in formats]} if rotated else {}
    )


def chain(previous: bytes, ids: Ids, depths: Depths | None = None) -> bytes:
    """Returns the key, 32 bytes, of the prefix that extends the one with the key `previous` by these ids: a SHA-256 of
    both.

    Args:
        ids: those of a page, [64], or of a part of one, [n].
        depths: how each was computed, [n], see `forms`; None: 0 for each.
    """
    digest = hashlib.sha256(previous + bytes([len(ids)]))
    digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    if depths is not None and depths.any():
        digest.update(depths.tobytes())
    return digest.digest()


def salted(seed: bytes, salt: str, adapter: str = "") -> bytes:
    """Returns the key of the empty prefix, from which the keys of all pages follow, for requests with this salt and
    this adapter, which share pages with each other only. Without either it is `seed`.

    Args:
        adapter: the digest of the adapter's files.
    """
    for mark, said in ((b"", salt), (b"\0adapter ", adapter)):
        if said:
            seed = hashlib.sha256(seed + mark + said.encode("utf-8", "replace")).digest()
    return seed


@dataclass(frozen=True, slots=True)
class Content:
    """The facts from which the keys of a sequence's pages are computed.

    Attributes:
        ids: [n] int32.
        depths: how each was computed, [n], see `forms`.
        root: the key of the empty prefix.
    """

    ids: Ids
    depths: Depths
    root: bytes

    def link(self, previous: bytes, first: int, end: int) -> bytes:
        """Returns the key of the prefix that ends before position `end`; `previous` is the key of the prefix that ends
        before position `first`.
        """
        if first == end:
            return previous
        return chain(previous, self.ids[first:end], self.depths[first:end])

    def label(self, kind: PageKind, previous: bytes, first: int, end: int) -> PageLabel:
        """Returns the label (key, ids and how each was computed) of the page or state that ends with the ids of
        positions first … end - 1; `previous` is the key of the prefix before them.
        """
        ids, depths = self.ids[first:end].copy(), self.depths[first:end].copy()
        return PageLabel(kind, self.link(previous, first, end), previous, end, ids, depths)
