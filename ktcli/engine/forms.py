"""Determines how each id of a sequence is computed: its depth of deferral, and the form of latent attention.

Latent attention has two forms. Many ids at once are cheapest *expanded* (keys and values of all heads are made from
what is cached), one alone *absorbed* (its query is brought to the latents); their last bits differ. So that an answer
never depends on what was cached, or on how a prompt was cut into steps, the form follows from the request alone:

- An id that was computed before, as the request says (`GenerationRequest.depths`), keeps its form.
- Of the others of a prompt the whole pages before the last id are expanded: just those that are found when the same is
  asked again. Few of them, behind ids that were computed before, are not worth expanding all of those.
- Where layers keep states only what other conversations begin with, too, is expanded (`GenerationRequest.shared`): an
  answer and what follows it can go on from no state but that at its end, so that its form must be the same for all
  requests of the conversation, wherever each of them ends.
- Everything else is absorbed: the prompt's last 1 … 64 ids, and the answer.

How an id is computed is a byte, and part of the keys of pages (prefix.py): its depth of deferral, and ABSORBED.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ktcli.native import PAGE_TOKENS

ABSORBED = 0x80  # in a byte that says how an id is computed: in the absorbed form; never where a model has one form
# Fewer new ids than this after others are not expanded. Absorbing one more id costs as much as expanding one before it,
# for each position, at lora * (nope + v) / (2 * lora - nope - v) ids: 170 for DeepSeek's widths.
_WORTH_EXPANDING = 2 * PAGE_TOKENS

How = NDArray[np.uint8]


def how_to_read(record: bytes, n: int, *, latent: bool, within: int | None = None) -> How:
    """Returns how each of the n ids of a prompt is to be computed, uint8 [n]: its depth of deferral, plus 0x80 if
    latent attention takes the absorbed form for it.

    Args:
        record: how the prompt's first ids were computed before, a byte for each; later ids were not computed.
        n: the number of ids of the prompt.
        latent: whether the model has latent attention.
        within: only ids before this index, or of `record`, may take the expanded form (0x80 not set); None: any may.
    """
    record = record[:n].rstrip(b"\0")
    before, most = len(record), max(0, n - 1 if within is None else min(n - 1, within))
    how = np.full(n, ABSORBED if latent else 0, np.uint8)
    how[:before] = np.frombuffer(record, np.uint8)
    if not latent:  # another model may have made the record
        how &= ABSORBED - 1
    first, end = (at // PAGE_TOKENS * PAGE_TOKENS for at in (before + PAGE_TOKENS - 1, most))
    if end - first >= (_WORTH_EXPANDING if before else PAGE_TOKENS):
        how[first:end] = 0
    return how


def expanded_spans(how: How) -> list[tuple[int, int]]:
    """Returns the (first, end) index ranges of the consecutive ids that latent attention computes in its expanded form.
    `how` has a byte for each id: 0x80 is set in those of the absorbed form.
    """
    edges = np.flatnonzero(np.diff(how < ABSORBED, prepend=False, append=False))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
