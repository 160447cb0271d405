"""Encodes the pieces of a sample separately, as a chat reads its prompt and a model writes its answer."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.records import dataclass
from ktcli.samples.pieces import TextPiece
from ktcli.text.control import Marked
from ktcli.text.model import TextModel
from ktcli.text.tokenizer import MAX_TOKEN_CHARS

_LINE = "\n"  # never one token together with what follows, in a vocabulary of pieces


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """The ids of a sample, and for each whether it is trained.

    Attributes:
        cut: whether there were more.
    """

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    cut: bool


class SampleEncoder:
    """Encodes samples of one model.

    Args:
        most: the ids that a sample may have.
    """

    def __init__(self, texts: TextModel, most: int) -> None:
        self._texts, self._most = texts, most
        # One object for each id: a sample then takes 16 bytes a token.
        self._shared: dict[int, int] = {}

    def conversation(self, pieces: Sequence[TextPiece]) -> EncodedSample:
        """Returns the ids of a conversation's pieces, one after another, and for each id whether it is trained; cut to
        the largest number of ids that a sample may have.
        """
        ids: list[int] = []
        trained: list[bool] = []
        before: TextPiece | None = None
        cut = False
        for piece in pieces:
            if cut or len(ids) > self._most:
                break
            text, cut = self._within(piece.text, len(ids))
            found = self._ids(before, text) if piece.trained else self._texts.control.encode(text)
            ids += found
            trained += [piece.trained] * len(found)
            if piece.ends and found:
                trained[-len(found)] = True
            before = piece
        return self._sample(ids, trained, cut)

    def text(self, text: str) -> EncodedSample:
        """Returns the ids of a text outside any turn, behind those with which the model begins texts, all of them
        trained; cut to the largest number of ids that a sample may have.
        """
        around = self._texts.around.before
        part, cut = self._within(Marked(text), len(around))
        ids = [*around, *self._texts.control.encode_text(part.marked)]
        return self._sample(ids, [True] * len(ids), cut)

    def _sample(self, ids: list[int], trained: list[bool], cut: bool) -> EncodedSample:
        most, shared = self._most, self._shared
        cut = cut or len(ids) > most
        own = tuple(shared.setdefault(id, id) for id in ids[:most])
        return EncodedSample(own, tuple(trained[:most]), cut)

    def _within(self, text: Marked, count: int) -> tuple[Marked, bool]:
        """Returns the beginning of a text which fills a sample of which `count` ids are there, and whether it has
        more: what is far too long is not encoded whole."""
        most = MAX_TOKEN_CHARS * (self._most - count + 1)
        if len(text.marked) <= most:
            return text, False
        return text.parts([0, most])[0], True

    def _ids(self, before: TextPiece | None, text: Marked) -> list[int]:
        """Returns the ids of an answer.

        Bytes are the same everywhere. A vocabulary of pieces may put a space before the beginning of a text, where an
        answer behind its prompt has none: there it is encoded behind the prompt, or a line's end.
        """
        encode = self._texts.control.encode
        if before is None or self._texts.tokenizer.byte_level:
            return encode(text)
        mark = text.mark or before.text.mark
        if before.text.mark in ("", mark):
            lead = before.text.marked
            first, whole = encode(Marked(lead, mark)), encode(Marked(lead + text.marked, mark))
            if whole[: len(first)] == first:
                return whole[len(first) :]
        first, whole = encode(Marked(_LINE)), encode(Marked(_LINE + text.marked, text.mark))
        return whole[len(first) :] if whole[: len(first)] == first else encode(text)
