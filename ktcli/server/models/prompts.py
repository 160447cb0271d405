"""Creates prompts from what clients send: messages are rendered and tokenized.

Clients send the whole conversation each time, as text. A model need not cut its own answers the way the tokenizer
would, and other ids mean that nothing of the answer is found in the cache. So the latest answers are remembered with
their ids; where the same caller sends a conversation that goes on behind one, its ids are taken. They are taken only
behind the very prompt that they answered, so that what others asked changes nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ktcli.dialogue.local import LocalBackend
from ktcli.dialogue.prompts import EncodedPrompt, PromptEncoder
from ktcli.dialogue.splice import Spoken
from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.server.http.inputsize import MARKED_WORK_MOST, rendering_work, require_room, too_long
from ktcli.text.infill import Infill

MOST_ANSWERS = 1024  # that are remembered
MOST_CHARS = 16 << 20  # of the text of these


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation that a client wants to have answered.

    Attributes:
        messages: as OpenAI's API has them, but with texts as contents.
        variables: further variables of the chat template, `tools` among them.
        caller: whose conversation it is; only their own answers are recalled.
        continues: whether the answer goes on behind the last message, which is the model's.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    caller: str = ""
    continues: bool = False


class PromptMaker:
    """Makes the prompts of one model; on the main thread only, except for `remember`.

    Attributes:
        infill: the marks for a text between two others; None: the model has none.
    """

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        context = backend.engine.context
        self._prompts = PromptEncoder(backend.texts, context, recurrent=backend.recurrent)
        self.infill = Infill.of(backend.texts.tokenizer.added)
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, Spoken] = OrderedDict()
        self._chars = 0

    @property
    def begin(self) -> tuple[int, ...]:
        """The token ids with which the model begins a text that is not a conversation; empty: none."""
        return self._backend.texts.begin

    def of_messages(self, asked: ChatRequest) -> EncodedPrompt:
        """Returns the prompt of a conversation: its messages as the chat template renders them, and their token ids.

        Raises:
            ContextFull: it does not fit, or would take too long. BadCheckpoint: the template refuses it.
        """
        context = self._backend.engine.context
        control = self._backend.texts.control
        work = rendering_work(asked.messages, asked.variables, control, context)
        prompts, messages, variables = self._prompts, asked.messages, asked.variables
        rendered = prompts.rendered(messages, variables, continues=asked.continues)
        spoken = self._recalled(rendered.text, asked.caller)
        ids = prompts.ids(rendered, spoken)
        self._require_room(ids)
        assert ids is not None
        further = work <= MARKED_WORK_MOST
        made = prompts.encoded(rendered.text, ids, messages, variables, spoken, further=further)
        begins = all(each.get("role") != "assistant" for each in messages)
        return replace(made, caller=asked.caller, continues=asked.continues, begins=begins)

    def of_text(self, text: str, caller: str = "") -> EncodedPrompt:
        """Returns the prompt of a text completion: the text and its token ids; control tokens in the text are plain
        text.

        Raises:
            ContextFull: it does not fit. UsageError: it is empty.
        """
        if not text:
            raise UsageError("the prompt is empty")
        ids = [*self._backend.texts.begin, *self.ids_of(text)]
        self._require_room(ids)
        return EncodedPrompt(text, ids, (), caller)

    def of_infill(self, before: str, behind: str, caller: str = "") -> EncodedPrompt:
        """Returns the prompt with which the model writes the text between `before` and `behind`; control tokens in them
        are plain text.

        Raises:
            ContextFull: it does not fit. UsageError: the model has no tokens for filling in text.
        """
        if self.infill is None:
            raise UsageError("this model has no tokens for filling in text before a suffix")
        begin = self._backend.texts.begin
        ids = [*begin, *self.infill.ids(self.ids_of(before), self.ids_of(behind))]
        self._require_room(ids)
        return EncodedPrompt(self.text_of(ids), ids, (), caller)

    def ids_of(self, text: str, *, special: bool = False) -> list[int]:
        """Returns the token ids of a text, without those that the model puts before a text.

        Args:
            special: whether spellings of control tokens in the text become control tokens; else they are plain text.
        Raises:
            ContextFull: the text surely has more tokens than the context holds, or too many control words.
        """
        texts, context = self._backend.texts, self._backend.engine.context
        require_room([text], texts.control, context)
        return texts.tokenizer.encode(text) if special else texts.control.encode_text(text)

    def of_ids(self, ids: Sequence[int], caller: str = "") -> EncodedPrompt:
        """Returns the prompt that consists of token ids that the client made itself, with their text.

        Raises:
            ContextFull: they do not fit. UsageError: one of them is outside the vocabulary.
        """
        self._require_room(ids)
        return EncodedPrompt(self.text_of(ids), ids, (), caller)

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, control tokens included.

        Raises:
            ContextFull: there are more ids than the context holds. UsageError: one of them is outside the vocabulary.
        """
        engine = self._backend.engine
        if len(ids) > engine.context:
            raise too_long(len(ids), engine.context)
        require_ids(ids, engine.spec.vocab)
        return self._backend.texts.tokenizer.decode(ids, special=True)

    def _require_room(self, ids: Sequence[int] | None) -> None:
        """Checks that ids leave room for an answer; None: there are surely too many. Raises: ContextFull."""
        context = self._backend.engine.context
        if ids is None or len(ids) >= context:
            raise too_long(None if ids is None else len(ids), context)

    def remember(self, prompt: EncodedPrompt, text: str, ids: Sequence[int]) -> None:
        """Stores the text and the token ids of an answer, so that the caller's later prompts that continue it
        contain these ids; ignored if the ids do not decode to all of the text."""
        spoken = Spoken(len(prompt.text), text, tuple(ids))
        if not text or not self._prompts.is_whole(spoken):
            return
        key = _of_answer(_of_caller(prompt.caller, prompt.text), text)
        with self._lock:
            before = self._answers.pop(key, None)
            self._answers[key] = spoken
            self._chars += len(text) - (len(before.text) if before else 0)
            while len(self._answers) > MOST_ANSWERS or self._chars > MOST_CHARS:
                _, old = self._answers.popitem(last=False)
                self._chars -= len(old.text)

    def _recalled(self, text: str, caller: str) -> list[Spoken]:
        """Returns the kept answers that occur in a caller's rendered conversation, in order."""
        found, read, before = [], 0, _of_caller(caller)
        with self._lock:
            places = sorted({(each.at, len(each.text)) for each in self._answers.values()})
            for at, length in places:
                if at + length > len(text):
                    continue
                before.update(_bytes(text[read:at]))
                read, key = at, _of_answer(before, text[at : at + length])
                if (spoken := self._answers.get(key)) is not None:
                    self._answers.move_to_end(key)
                    found.append(spoken)
        return found


PromptSource = Callable[[PromptMaker], EncodedPrompt]  # makes one prompt, on the main thread


def require_ids(ids: Iterable[int], vocab: int, where: str = "") -> None:
    """Checks that token ids are in a vocabulary of `vocab` ids; `where` begins the error's message.

    Raises:
        UsageError: one of them is not.
    """
    if (bad := next((id for id in ids if not 0 <= id < vocab), None)) is not None:
        raise UsageError(f"{where}token id {bad} is outside the vocabulary of {vocab}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _of_caller(caller: str, text: str = "") -> hashlib._Hash:
    """Returns the hash of a caller and of a rendered text."""
    made = hashlib.sha256(hashlib.sha256(_bytes(caller)).digest())
    made.update(_bytes(text))
    return made


def _of_answer(before: hashlib._Hash, text: str) -> bytes:
    """Returns the key of an answer: the hash of it and of everything before it."""
    made = before.copy()
    made.update(b"\xff")  # no part of any text
    made.update(_bytes(text))
    return made.digest()
