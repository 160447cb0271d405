"""The documents of one optimizer step, concatenated without padding, and which of their tokens are trained.

Neighbouring documents go through a layer together; a document sees only itself, and its positions begin at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from ktcli.errors import UsageError
from ktcli.ops.torch.functions import Rows
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a step.

    Attributes:
        ids: int64 [T], those of all documents, one after the other.
        lengths: the tokens of each document, 1 or more.
        rows: int64 [N], ascending: the rows whose logits are trained.
        labels: int64 [N]: the id that each of them should predict.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    labels: Tensor

    def on(self, device: torch.device) -> Documents:
        """Returns the same documents with the trained rows and labels on a device; the ids stay in main memory, as the
        embedding does.
        """
        return replace(self, rows=self.rows.to(device), labels=self.labels.to(device))

    @property
    def together(self) -> DocumentGroup:
        """All documents of the step as one group, which goes through a layer together."""
        return DocumentGroup(0, self.lengths, self.rows.device)

    def groups(self, most: int) -> tuple[DocumentGroup, ...]:
        """Returns the documents in groups of neighbours with at most `most` rows (tokens) each; a longer document is a
        group by itself.
        """
        found, first, lengths = list[DocumentGroup](), 0, list[int]()
        for length in self.lengths:
            if lengths and sum(lengths) + length > most:
                found.append(DocumentGroup(first, tuple(lengths), self.rows.device))
                first, lengths = first + sum(lengths), []
            lengths.append(length)
        return (*found, DocumentGroup(first, tuple(lengths), self.rows.device))


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Neighbouring documents of a step, which go through a layer together.

    Attributes:
        first: the number of their first row in the step.
        lengths: the tokens of each.
        device: where they are computed.
    """

    first: int
    lengths: tuple[int, ...]
    device: torch.device

    @property
    def rows(self) -> slice:
        """The slice of the step's rows (tokens) that belong to the documents of the group."""
        return slice(self.first, self.first + sum(self.lengths))

    @property
    def parts(self) -> tuple[Rows, ...]:
        """The positions of the group's rows, one `Rows` for each run of neighbouring documents of equal length."""
        found = []
        for length, group in groupby(self.lengths):
            count = len(list(group))
            positions = torch.arange(length, device=self.device).repeat(count)
            pages = torch.zeros(count, 0, dtype=torch.int32, device=self.device)
            found.append(Rows(positions, pages, length, start=0))
        return tuple(found)


def pack_documents(
    documents: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]] | None,
    *,
    vocab: int,
    context: int,
) -> Documents:
    """Returns the documents of a step, their ids concatenated, with the rows whose logits are trained and the ids that
    these should predict.

    Args:
        documents: the ids of each.
        masks: for each id whether it is trained, that is predicted from the ids before it; the first of a document
            never is. None: nothing is trained.
        vocab: the number of ids in the vocabulary.
        context: the most tokens of a document.
    Raises:
        UsageError: there is no document, one is empty or too long, an id is out of range, a mask has another length, or
            no token is trained although there are masks.
    """
    if not documents:
        raise UsageError("a training step needs at least one document")
    if masks is not None and len(masks) != len(documents):
        raise UsageError(f"there are {len(masks)} masks for {len(documents)} documents")
    for number, ids in enumerate(documents, 1):
        _check(number, ids, vocab, context)
    rows: list[int] = []
    labels: list[int] = []
    first = 0
    for number, ids in enumerate(documents, 1):
        mask = masks[number - 1] if masks is not None else [False] * len(ids)
        if len(mask) != len(ids):
            raise UsageError(
                f"document {number} has {len(ids)} tokens, but its mask has {len(mask)}"
            )
        trained = [at for at in range(1, len(ids)) if mask[at]]
        rows += [first + at - 1 for at in trained]
        labels += [ids[at] for at in trained]
        first += len(ids)
    if masks is not None and not rows:
        raise UsageError("no token of the step is trained; the first of a document never is")
    every = torch.tensor([each for ids in documents for each in ids])
    return Documents(
        every, tuple(map(len, documents)), torch.tensor(rows).long(), torch.tensor(labels).long()
    )


def _check(number: int, ids: Sequence[int], vocab: int, context: int) -> None:
    """Checks one document.

    Raises:
        UsageError: it is empty, too long, or has an id out of range.
    """
    if not len(ids):
        raise UsageError(f"document {number} of the step is empty")
    if len(ids) > context:
        raise UsageError(
            f"document {number} has {len(ids)} tokens, but the model was opened for at most {context}"
        )
    at = next((at for at, each in enumerate(ids) if not 0 <= each < vocab), None)
    if at is not None:
        raise UsageError(
            f"token {at} of document {number} is {ids[at]}, which is not one of the model's {vocab} ids"
        )
