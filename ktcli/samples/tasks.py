"""Makes tasks of data files: questions with right answers, in the formats in which samples are written.

The last answer of a row is the right one, and what comes before it is the question. A row may name the answers from
which one is to be chosen, as a list with the key `choices`; the right one is among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ktcli.records import dataclass
from ktcli.samples.conversation import (
    THOUGHT,
    Message,
    TrainedConversation,
    TrainedText,
    asks,
    with_default_system,
)
from ktcli.samples.messages import list_of, text_of
from ktcli.samples.read import ReadingListener, open_contents, require_template
from ktcli.samples.rows import DataRow
from ktcli.samples.sample import BadData, DropCount, DropCounter, SampleSettings
from ktcli.samples.source import DataSource
from ktcli.text.model import TextModel

CHOICES = "choices"
MOST_CHOICES = 256  # of a row: each is read by the model, behind the whole question
_UNANSWERED = "no right answer to compare with"
_UNASKED = "an answer to nothing"
_CALLS = "the right answer calls a tool, which is not compared"


@dataclass(frozen=True, slots=True)
class Task:
    """A question and its right answer.

    Attributes:
        messages: the conversation up to the question.
        reference: the right answer, without thoughts and blanks around it.
        choices: the answers from which one is to be chosen; empty: the answer is free.
        where: the row it comes from, as in `Sample.where`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    reference: str
    choices: tuple[str, ...]
    where: str

    @property
    def right(self) -> int:
        """The index of the right answer in `choices`."""
        return self.choices.index(self.reference)

    def answered(self, text: str) -> TrainedConversation:
        """Returns the task's conversation with this text as its last answer, the only part that is trained."""
        answer = {"role": "assistant", "content": text}
        trained = (*(False for _ in self.messages), True)
        return TrainedConversation((*self.messages, answer), trained, self.tools)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """The tasks of a data file.

    Attributes:
        name: of the file.
        rows: the rows that were read.
        dropped: those that are not asked, by reason.
    """

    name: str
    tasks: tuple[Task, ...]
    rows: int
    dropped: tuple[DropCount, ...]

    def without(self, left_out: Mapping[int, str]) -> TaskSet:
        """Returns a copy of the set without some tasks, which are counted as dropped.

        Args:
            left_out: the reason for each task that is left out, by its index.
        """
        kept = tuple(task for n, task in enumerate(self.tasks) if n not in left_out)
        drops = DropCounter(self.dropped)
        for number, reason in left_out.items():
            drops.add(reason, self.tasks[number].where)
        return replace(self, tasks=kept, dropped=drops.counts)


def read_tasks(
    source: DataSource,
    texts: TextModel,
    settings: SampleSettings,
    listener: ReadingListener | None = None,
) -> TaskSet:
    """Returns the tasks of a data file, each a question and its right answer, in the order of its rows, with counts of
    rows that are not asked.

    Raises:
        NotFound, BadData: the file cannot be read, a row is invalid or plain text, or no row has a right answer.
    """
    found: list[Task] = []
    drops, count = DropCounter(), 0
    with open_contents(source, settings, listener) as contents:
        for row, content in contents:
            count += 1
            if isinstance(content, TrainedText):
                raise BadData(
                    f"{row.where}: plain text, which has no question and no answer",
                    hint="--data measures how well a model predicts it",
                )
            require_template(texts.template, row.where)
            task = _task(content, _choices(row), row.where, settings)
            if isinstance(task, str):
                drops.add(task, row.where)
            else:
                found.append(task)
    if not found:
        said = drops.sentence or "no rows"
        raise BadData(f"{source.name} has no question with a right answer: {said}")
    return TaskSet(source.name, tuple(found), count, drops.counts)


def _task(
    content: TrainedConversation, choices: tuple[str, ...], where: str, settings: SampleSettings
) -> Task | str:
    """Returns the task that a row is, or the reason why it is none."""
    if not content.answers:
        return _UNANSWERED
    last = content.answers[-1]
    asked, answer = list(content.messages[:last]), content.messages[last]
    if answer.get("tool_calls"):
        return _CALLS
    if not asks(asked):
        return _UNASKED
    asked = with_default_system(asked, settings.default_system)
    reference = THOUGHT.sub("", str(answer["content"]), count=1).strip()
    if not reference:
        return _UNANSWERED
    if choices and reference not in choices:
        raise BadData(
            f"{where}: the answer {reference[:60]!r} is not one of its choices",
            hint=f"the answer must be one of the texts in {CHOICES}, for example B of [A, B, C, D]",
        )
    return Task(tuple(asked), content.tools, reference, choices, where)


def _choices(row: DataRow) -> tuple[str, ...]:
    """Returns the choices of a row, without blanks around them; empty: it has none.

    Raises:
        BadData: they are not several different texts.
    """
    place = f"{row.where}: {CHOICES}"
    given = list_of(row.values.get(CHOICES), place)
    found = tuple(text_of(each, f"{place}[{at}]").strip() for at, each in enumerate(given))
    if not found:
        return ()
    if not all(found):
        raise BadData(f"{place}[{found.index('')}] is empty")
    if len(found) < 2 or len(set(found)) < len(found):
        raise BadData(
            f"{place} must be several different texts", hint='for example: ["A", "B", "C", "D"]'
        )
    if len(found) > MOST_CHOICES:
        raise BadData(f"{place} has {len(found):,} texts, but at most {MOST_CHOICES} are read")
    return found
