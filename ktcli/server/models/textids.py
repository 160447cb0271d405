"""The texts of a request for embeddings: their limits, and their ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ktcli.errors import ContextFull, UsageError
from ktcli.models.pooling import PoolingMode, TextPooling
from ktcli.records import dataclass
from ktcli.server.models.model import ServedModel
from ktcli.server.models.prompts import require_ids
from ktcli.text.control import Marked
from ktcli.text.tokenizer import MAX_TOKEN_CHARS

INPUTS_MOST = 2048  # of one request, as OpenAI has it
TOKENS_MOST = 300_000  # of all of them, as OpenAI has it
CHARS_MOST = 2_000_000  # of all of them
NUMBERS_MOST = 1 << 23  # of all vectors: 32 MiB, which wait for the client
_JOB_CHARS = 1 << 16  # that are cut into ids in one job of the main thread: 20 ms
_CUT_CHARS = 8  # characters for each token that is wanted, with which cutting a long text begins
_WORDS_MOST = 10_000  # that pretend to be control tokens: 10 to 20 µs each

Text = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """The texts of which embeddings are wanted.

    Attributes:
        texts: each as text, or as the ids that the client made of it, with those around it.
        caller: whoever asks.
        prompt: the text before each that is not ids.
        truncate: whether the end of a text that is too long is left out; else it is refused.
        most: the most tokens of a text that the client wants; 0: as many as the model takes.
        dimensions: the length of the vectors; 0: the model's own.
        field: what the client calls the texts.
    """

    texts: Sequence[Text]
    caller: str = ""
    prompt: str = ""
    truncate: bool = False
    most: int = 0
    dimensions: int = 0
    field: str = "input"


@dataclass(frozen=True, slots=True)
class TextIds:
    """The ids of one text, and the index of the first whose hidden row counts."""

    ids: NDArray[np.int32]
    since: int


class TextCutter:
    """Encodes the texts of a request, with the ids around them; `cut` is for the main thread."""

    def __init__(self, model: ServedModel, pooling: TextPooling, asked: EmbeddingRequest) -> None:
        engine, texts = model.backend.engine, model.texts
        self._asked, self._pooling = asked, pooling
        self._texts, self._vocab, self._name = texts, engine.spec.vocab, model.name
        own = min(engine.context, pooling.max_tokens or engine.context)
        self._most = min(own, asked.most or own)
        self._around = len(texts.around.before) + len(texts.around.behind)
        self._words = 0

    def parts(self) -> Iterator[Sequence[int]]:
        """Yields lists of indices of the request's texts: those that are tokenized in one job each.

        Raises:
            UsageError: the texts have more than 2,000,000 characters.
        """
        if not self._asked.texts:
            return
        sizes = [self._size(text) for text in self._asked.texts]
        if (chars := sum(sizes)) > CHARS_MOST:
            raise UsageError(
                f"the texts have {chars:,} characters; the limit for one request is {CHARS_MOST:,}"
            )
        part: list[int] = []
        size = 0
        for number, each in enumerate(sizes):
            if part and size + each > _JOB_CHARS:
                yield part
                part, size = [], 0
            part.append(number)
            size += each
        yield part

    def _size(self, text: Text) -> int:
        """Returns the most characters of a text with its prompt that are looked at, or the number of its ids."""
        if not isinstance(text, str):
            return len(text)
        return min(len(self._asked.prompt) + len(text), MAX_TOKEN_CHARS * self._most)

    def cut(self, numbers: Sequence[int]) -> list[TextIds]:
        """Returns the token ids of the texts with these indices, including those that the model puts around a text.

        Raises:
            UsageError: a text has no tokens, or an id outside the vocabulary, or all have too many control words.
            ContextFull: a text has too many tokens, and may not be cut.
        """
        return [self._one(number, self._asked.texts[number]) for number in numbers]

    def _one(self, number: int, text: Text) -> TextIds:
        what = f"{self._asked.field}[{number}]" if len(self._asked.texts) > 1 else self._asked.field
        is_text = isinstance(text, str)
        ids = self._of_text(text, what) if isinstance(text, str) else self._of_ids(text, what)
        if not ids:
            raise UsageError(f"{what} is empty")
        return TextIds(np.array(ids, np.int32), min(self._since, len(ids) - 1) if is_text else 0)

    @cached_property
    def _since(self) -> int:
        """The first position whose hidden row counts, behind the prompt if that does not."""
        prompt, pooling = self._asked.prompt, self._pooling
        if not prompt or pooling.include_prompt or pooling.mode is not PoolingMode.MEAN:
            return 0
        return len(self._texts.around.before) + len(self._texts.control.encode_text(prompt))

    def _of_text(self, text: str, what: str) -> list[int]:
        """Returns the ids of a text with its prompt, and those around them."""
        around, room = self._texts.around, max(0, self._most - self._around)
        ids = self._fitting(self._asked.prompt + text, room, what)
        if len(ids) > room:
            if not self._asked.truncate:
                raise self._too_long(what, len(ids))
            ids = ids[:room]
        return [*around.before, *ids, *around.behind]

    def _of_ids(self, ids: Sequence[int], what: str) -> list[int]:
        """Returns ids that the client made itself, as they are."""
        if len(ids) > self._most and not self._asked.truncate:
            raise self._too_long(what, len(ids))
        require_ids(ids, self._vocab, f"{what}: ")
        return list(ids[: self._most])

    def _fitting(self, text: str, room: int, what: str) -> list[int]:
        """Returns the ids of a text; of one that is too long at least the first `room` and one more, if its end may be
        left out.

        Raises:
            ContextFull: it is too long. UsageError: it has too many words of control tokens.
        """
        control, room = self._texts.control, max(1, room)
        longest = MAX_TOKEN_CHARS * room
        if not self._asked.truncate:
            if len(text) > longest or control.exceeds(Marked(text), room):
                raise self._too_long(what, None)
            return self._encoded(text, what)
        chars = _CUT_CHARS * room
        ids = self._encoded(text[:chars], what)
        while len(ids) <= room and chars < min(len(text), longest):
            chars *= 2
            ids = self._encoded(text[:chars], what)
        return ids

    def _encoded(self, text: str, what: str) -> list[int]:
        control = self._texts.control
        self._words += sum(1 for _ in islice(control.places(text), _WORDS_MOST + 1))
        if self._words > _WORDS_MOST:
            raise UsageError(
                f"{what}: the texts contain more than {_WORDS_MOST:,} words that look like control tokens"
            )
        return control.encode_text(text)

    def _too_long(self, what: str, tokens: int | None) -> ContextFull:
        room = self._most - self._around
        said = f"more than {room:,}" if tokens is None else f"{tokens:,}"
        return ContextFull(
            f"{what} has {said} tokens; {self._name} embeds texts of up to {room:,} here",
            hint="send shorter texts",
        )


def shortened(pooling: TextPooling, dimensions: int | None, own: int, name: str) -> int:
    """Returns the length to which a request wants the embedding vectors shortened; 0: they keep the model's own.

    Args:
        dimensions: the length that the request names; None: it names none.
        own: the length of the model's own vectors.
        name: of the model, for errors.
    Raises:
        UsageError: the model's vectors cannot have that length.
    """
    if dimensions is None or dimensions == own:
        return 0
    if not 1 <= dimensions <= own:
        raise UsageError(f"dimensions must be 1 to {own:,}, not {dimensions}")
    if pooling.any_length or dimensions in pooling.lengths:
        return dimensions
    known = ", ".join(f"{each:,}" for each in pooling.lengths)
    also = f" or {known}" if known else "; its files do not say that they may be shortened"
    raise UsageError(f"dimensions: the embeddings of {name} have {own:,} dimensions{also}")


def require_few(inputs: int, dimensions: int, field: str) -> None:
    """Checks that a request for embeddings has at most 2,048 texts, and at most 2^23 numbers in all vectors together.

    Args:
        inputs: the number of texts.
        dimensions: the length of each vector.
        field: what the request calls the texts.
    Raises:
        UsageError: there are too many texts.
    """
    most = min(INPUTS_MOST, NUMBERS_MOST // dimensions)
    if inputs > most:
        raise UsageError(
            f"{field} has {inputs:,} texts; the limit for vectors of {dimensions:,} numbers is {most:,}"
        )
