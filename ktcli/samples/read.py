"""Creates samples from data files: reads their rows, renders and encodes them, and counts what is left out."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from random import Random
from typing import Protocol

from ktcli.samples.blocks import digest
from ktcli.samples.conversation import TrainedConversation, TrainedText
from ktcli.samples.encoding import EncodedSample, SampleEncoder
from ktcli.samples.formats import Content, content_of, format_of
from ktcli.samples.mixing import check_shares, mixed
from ktcli.samples.pieces import ConversationCutter
from ktcli.samples.rows import DataRow, rows
from ktcli.samples.sample import BadData, DropCounter, Sample, SampleSet, SampleSettings
from ktcli.samples.source import DataSource
from ktcli.text.model import TextModel
from ktcli.text.template import ChatTemplate, ConversationRefused

_FORM = 1  # of what is hashed
_DUPLICATE = "same as an earlier sample"
_EMPTY, _SOME_EMPTY = "empty answers only", "an empty answer is not trained"
_UNANSWERED = "no answer to train on"
_SHORT = "fewer than two tokens, so none is predicted"
_SKIPPED = "an answer without a prompt, or not rendered after it, is not trained"
_REFUSED = "refused by the chat template"

# What a user might not expect, by the field of `CutConversation` that has the number of such answers.
_NOTES = {
    "closed": "the chat template's prompt for an answer ends in a thought: {:,} of the answers are trained after it, "
    "with their own thoughts if the prompt has begun one, and without them if it has ended it",
    "endless": "the chat template writes no end-of-answer token after {:,} of the answers, so none is trained there",
    "unthought": "the chat template leaves thoughts out of answers like these: the thoughts of {:,} answers are not "
    "trained",
}


class ByteBar(Protocol):
    """A progress bar of bytes."""

    def update(self, *, done: int, total: int | None = None) -> None:
        """Sets what the progress bar shows: `done`, the bytes read so far, and `total`, all bytes."""


class ReadingListener(Protocol):
    """The interface of a listener for the progress of reading."""

    def progress(
        self, title: str, total: int | None = None, *, unit: str = "B", done: int = 0
    ) -> AbstractContextManager[ByteBar]:
        """Returns a context manager that shows a progress bar with this title while its context is open, and gives the
        bar.
        """


def read_samples(
    sources: Sequence[DataSource],
    texts: TextModel,
    settings: SampleSettings,
    listener: ReadingListener | None = None,
) -> SampleSet:
    """Returns the samples made from the rows of data files, in the order of the rows (of several files as
    `mix_strategy` says), with counts of the rows that were left out or cut, by reason.

    Raises:
        NotFound, BadData: a file cannot be read, a row is invalid, or nothing in them can be trained.
        UsageError: the shares in `interleave_probs` are invalid. BadCheckpoint: the chat template is broken.
    """
    check_shares(settings, len(sources))
    sha256 = _sha256(sources, texts, settings)
    maker = _SampleMaker(texts, settings)
    groups = [maker.read(source, listener) for source in sources]
    names = [source.name for source in sources]
    found = mixed(groups, names, settings)
    if not found:
        raise BadData(
            f"{', '.join(names)} has no row to train on: {maker.drops.sentence or 'there are no rows'}",
            hint="check its contents: each row needs a question and an answer, or a text",
        )
    return SampleSet(tuple(found), maker.drops.counts, sha256, maker.count, maker.notes)


def _sha256(sources: Sequence[DataSource], texts: TextModel, settings: SampleSettings) -> str:
    """Returns the hash of all that samples are made of, but the tokenizer."""
    files = [
        {**asdict(source), "name": source.path.suffix, "path": digest(source.path)}
        for source in sources
    ]
    whole = {
        "form": _FORM,
        "files": files,
        "settings": {**asdict(settings), "interleave_probs": list(settings.interleave_probs)},
        "template": texts.template.source,
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


class _SampleMaker:
    """Makes samples of rows, and remembers those that it knows and what it left out."""

    def __init__(self, texts: TextModel, settings: SampleSettings) -> None:
        self._settings, self._template = settings, texts.template
        self._cutter = ConversationCutter(texts, settings)
        self._encoder = SampleEncoder(texts, settings.cutoff_len)
        self.drops = DropCounter()  # what was left out or cut
        self._last: dict[str, str] = {}  # the row last counted for a reason
        self._known: set[bytes] = set()
        self._noted = Counter[str]()  # answers, by what is noted of them
        self._cut = f"cut to {settings.cutoff_len:,} tokens"
        self._beyond = f"nothing to train in the first {settings.cutoff_len:,} tokens"
        self.count = 0  # of rows that were read

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what a user might not expect."""
        return tuple(text.format(self._noted[of]) for of, text in _NOTES.items() if self._noted[of])

    def read(self, source: DataSource, listener: ReadingListener | None) -> list[Sample]:
        """Returns the samples of a source."""
        found: list[Sample] = []
        with open_contents(source, self._settings, listener) as contents:
            for row, content in contents:
                self.count += 1
                found += self._samples(content, row.where)
        return found

    def _samples(self, content: TrainedConversation | TrainedText, where: str) -> Iterator[Sample]:
        """Yields the samples of what a row says."""
        if isinstance(content, TrainedText):
            yield from self._checked([self._encoder.text(content.text)], where)
            return
        require_template(self._template, where)
        if not content.answers:
            self._drop(_EMPTY if content.has_empty else _UNANSWERED, where)
            return
        try:
            cut = self._cutter.cut(content)
        except ConversationRefused:
            self._drop(_REFUSED, where)
            return
        if content.has_empty:
            self._drop(_SOME_EMPTY, where)
        if cut.skipped:
            self._drop(_SKIPPED, where)
        if cut.beyond:
            self._drop(self._cut if cut.samples else self._beyond, where)
        self._noted.update({of: getattr(cut, of) for of in _NOTES})
        yield from self._checked(map(self._encoder.conversation, cut.samples), where)

    def _checked(self, found: Iterable[EncodedSample], where: str) -> Iterator[Sample]:
        """Yields those of a row's samples that can be trained and are not known."""
        for each in found:
            trained = each.trained
            if self._settings.train_on_prompt:
                trained = (True,) * len(trained)
            if not any(trained[1:]):  # the first token of a document is predicted from nothing
                short = _SHORT if len(trained) < 2 else _EMPTY
                self._drop(self._beyond if each.cut else short, where)
                continue
            key = hashlib.blake2b(array("q", each.ids).tobytes() + bytes(trained), digest_size=16)
            if key.digest() in self._known:
                self._drop(_DUPLICATE, where)
                continue
            self._known.add(key.digest())
            if each.cut:
                self._drop(self._cut, where)
            yield Sample(each.ids, trained, where)

    def _drop(self, reason: str, where: str) -> None:
        """Counts a row for a reason, once."""
        if self._last.get(reason) != where:
            self._last[reason] = where
            self.drops.add(reason, where)


@contextmanager
def open_contents(
    source: DataSource, settings: SampleSettings, listener: ReadingListener | None
) -> Iterator[Iterator[tuple[DataRow, Content]]]:
    """Opens a context that gives an iterator of (row, its conversation or text) over the first `max_samples` rows of a
    data file, or of a random sample of its rows if the source asks for one. A row in no known format raises BadData.
    """
    title, size = f"Reading {source.name}", source.path.stat().st_size
    with listener.progress(title, size) if listener else nullcontext() as bar:
        found: Iterable[DataRow] = rows(
            source.path, (lambda done: bar.update(done=done)) if bar else None
        )
        if source.num_samples is not None:
            found = _drawn(found, source.num_samples, settings.seed)
        yield _contents(source, islice(found, settings.max_samples))


def _contents(source: DataSource, found: Iterable[DataRow]) -> Iterator[tuple[DataRow, Content]]:
    format = None
    for row in found:
        format = format or format_of(source, row)
        yield row, content_of(row, format)


def require_template(template: ChatTemplate, where: str) -> None:
    """Raises an error if the model has no chat template, so that the conversation in the row `where` cannot be
    rendered.

    Raises:
        BadData: the model has no chat template.
    """
    if not template.source:
        raise BadData(
            f"{where}: the row is a conversation, but {template.name} has no chat template"
            " (base models have none)",
            hint='train on plain text, {"text": "…"}, or use the instruction-tuned version',
        )


def _drawn(found: Iterable[DataRow], count: int, seed: int) -> list[DataRow]:
    """Returns so many rows by chance, each as likely as any other, in their order; all if there are fewer."""
    chance = Random(seed)
    kept: list[tuple[int, DataRow]] = []
    for number, row in enumerate(found):
        if number < count:
            kept.append((number, row))
        elif (place := chance.randrange(number + 1)) < count:
            kept[place] = (number, row)
    return [row for _, row in sorted(kept, key=lambda each: each[0])]
