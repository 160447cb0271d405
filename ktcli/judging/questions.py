"""Makes prompts of tasks, for each model that is asked, and finds what cannot be asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ktcli.dialogue.prompts import EncodedPrompt, PromptEncoder
from ktcli.judging.heldout import Mask, window_of
from ktcli.measure.evaluate import Window
from ktcli.records import dataclass
from ktcli.samples.encoding import SampleEncoder
from ktcli.samples.pieces import ConversationCutter, template_variables
from ktcli.samples.sample import SampleSettings
from ktcli.samples.tasks import Task, TaskSet
from ktcli.text.model import TextModel
from ktcli.text.template import ConversationRefused

_REFUSED = "refused by the chat template"
_UNSCORED = (
    "a choice that is too long, or that the chat template does not render behind its question"
)

Choice = tuple[Window, Mask]  # the question with one answer, and which predictions are of that


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model that is asked.

    Attributes:
        label: its name for people.
        texts: as of its chats.
        adapted: whether the adapter answers.
    """

    label: str
    texts: TextModel
    adapted: bool


@dataclass(frozen=True, slots=True)
class TaskQuestion:
    """A task, encoded for the models.

    Attributes:
        prompts: the prompt for each model.
        choices: for each model its choices; empty: the answer is free.
    """

    task: Task
    prompts: tuple[EncodedPrompt, ...]
    choices: tuple[tuple[Choice, ...], ...]

    @property
    def longest(self) -> int:
        """The number of ids of the longest prompt of the question, or of the longest prompt with a choice behind it."""
        choices = (len(window.ids) for each in self.choices for window, _ in each)
        return max(*(len(prompt.ids) for prompt in self.prompts), 0, *choices)


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of a data file, and the tasks that they were made of."""

    read: TaskSet
    questions: tuple[TaskQuestion, ...]


def questions_of(
    read: TaskSet, models: Sequence[AskedModel], settings: SampleSettings, *, recurrent: bool
) -> QuestionSet:
    """Returns the tasks of a data file encoded as prompts for the models. A task is left out for all models if a chat
    template refuses it or does not render one of its choices, or if its prompt, alone or with a choice, has more than
    `cutoff_len` tokens.

    Args:
        recurrent: whether some layer of the models keeps a recurrent state.
    Raises:
        BadCheckpoint: a chat template is broken.
    """
    makers = [_Maker(model, settings, recurrent=recurrent) for model in models]
    found: list[TaskQuestion] = []
    left_out: dict[int, str] = {}
    for number, task in enumerate(read.tasks):
        try:
            prompts = [maker.prompt(task) for maker in makers]
            choices = [maker.choices(task) for maker in makers]
        except ConversationRefused:
            left_out[number] = _REFUSED
            continue
        if None in prompts:
            left_out[number] = f"a prompt of more than {settings.cutoff_len:,} tokens"
        elif None in choices:
            left_out[number] = _UNSCORED
        else:
            whole = tuple(each for each in prompts if each)
            found.append(TaskQuestion(task, whole, tuple(each for each in choices if each)))
    return QuestionSet(read.without(left_out), tuple(found))


class _Maker:
    """Makes the prompts of one model."""

    def __init__(self, model: AskedModel, settings: SampleSettings, *, recurrent: bool) -> None:
        texts, most = model.texts, settings.cutoff_len
        last = replace(settings, mask_history=True, train_on_prompt=False)
        self._texts, self._settings = texts, settings
        self._prompts, self._most = PromptEncoder(texts, most, recurrent=recurrent), most
        self._cutter, self._encoder = ConversationCutter(texts, last), SampleEncoder(texts, most)

    def prompt(self, task: Task) -> EncodedPrompt | None:
        """Returns the prompt of a task as a chat makes it; None: it is too long."""
        variables = template_variables(self._texts, self._settings, task.tools)
        rendered = self._prompts.rendered(task.messages, variables)
        ids = self._prompts.ids(rendered, ())
        if ids is None or len(ids) > self._most:
            return None
        return self._prompts.encoded(rendered.text, ids, task.messages, variables)

    def choices(self, task: Task) -> tuple[Choice, ...] | None:
        """Returns the choices of a task, each behind its question; None: one of them is not rendered there, or is
        too long."""
        found = []
        for text in task.choices:
            cut = self._cutter.cut(task.answered(text))
            if len(cut.samples) != 1:
                return None
            encoded = self._encoder.conversation(cut.samples[0])
            if encoded.cut or not any(encoded.trained[1:]):
                return None
            found.append(window_of(encoded.ids, encoded.trained))
        return tuple(found)
