"""Divides a conversation where its answers begin and end: into pieces that are read, and pieces that are trained.

What a model is to learn is what it would have generated. So the prompt of each answer is rendered as a chat would
render it, and the conversation with that answer at its end as well: what the second text has more than the first is the
answer and the token that ends it. Where the answers of a conversation follow one another in one text they become one
sample; where a template writes what was said before in another way (without thoughts, say), a later answer gets a
sample of its own. A template with the tag `{% generation %}` says itself what is trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ktcli.dialogue.rendering import rendered
from ktcli.records import dataclass
from ktcli.samples.conversation import (
    THOUGHT,
    Message,
    TrainedConversation,
    asks,
    with_default_system,
)
from ktcli.samples.sample import SampleSettings
from ktcli.text.control import Marked
from ktcli.text.model import TextModel
from ktcli.text.template import ANSWER_MARKS, REASONING, ConversationRefused

_LEAST_CONTEXT = 1 << 15  # tokens; a text far longer than the context is not looked at closely
_MARKS = re.compile("([" + "".join(ANSWER_MARKS) + "])")
# The end of a prompt: a thought begun, or one of no words.
_OPENS = re.compile(r"<think>(\s*)(?:(</think>)(\s*))?\Z")
_ANY_THOUGHT = re.compile(r"\s*(?:<think>.*?)?</think>", re.DOTALL)
_NO_THOUGHT = re.compile(r"(\s*<think>)(\n?)\s*(</think>)")
_TAIL = 8  # characters by which the end of a prompt without control tokens is known
_MOST_LED = 16  # characters that a template writes behind a prompt before any answer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a sample's text.

    Attributes:
        trained: whether all of it is.
        ends: whether its first token is what ends the answer before it, and is trained.
    """

    text: Marked
    trained: bool
    ends: bool = False


@dataclass(frozen=True, slots=True)
class CutConversation:
    """The samples of a conversation, as pieces.

    Attributes:
        skipped: answers to nothing, or that the template does not render behind the prompt for them.
        beyond: answers whose prompt alone fills a sample.
        closed: answers behind a prompt that ends in a thought, which the template does not repeat before them.
        endless: answers behind which the template writes no token that ends them.
        unthought: answers whose thoughts the template leaves out.
    """

    samples: tuple[tuple[TextPiece, ...], ...]
    skipped: int = 0
    beyond: int = 0
    closed: int = 0
    endless: int = 0
    unthought: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer behind its prompt; `stop` is the text of the token that ends it, empty: there is none."""

    prompt: Marked
    said: Marked
    stop: str
    closed: bool = False
    unthought: bool = False

    @property
    def text(self) -> str:
        """Everything up to the end of the answer, without its stop."""
        return self.prompt.text + self.said.text


class ConversationCutter:
    """Cuts conversations for one model."""

    def __init__(self, texts: TextModel, settings: SampleSettings) -> None:
        self._texts, self._settings = texts, settings
        self._context = max(settings.cutoff_len, _LEAST_CONTEXT)
        ends = [token.text for token in texts.tokenizer.added if token.id in texts.stop_ids]
        self._stops = tuple(sorted(ends, key=len, reverse=True))

    def cut(self, conversation: TrainedConversation) -> CutConversation:
        """Returns the samples into which a conversation is cut, each as pieces of text that are trained or not, with
        counts of answers that are left out or rendered incompletely; no samples if no answer in it is trained.

        Raises:
            BadCheckpoint: the template refuses the conversation, or is broken.
        """
        messages = with_default_system(conversation.messages, self._settings.default_system)
        wanted = list(conversation.answers)
        shift = len(messages) - len(conversation.messages)
        wanted = [at + shift for at in wanted]
        wanted = wanted[-1:] if self._settings.mask_history else wanted
        variables = template_variables(self._texts, self._settings, conversation.tools)
        if not wanted:
            return CutConversation(())
        if self._texts.template.says_what_is_trained:
            found = self._by_tags(messages, wanted, variables)
            if found is not None:
                return CutConversation((tuple(found),))
        return self._by_prefixes(messages, wanted, variables)

    def _rendered(
        self, messages: Sequence[Message], variables: Mapping[str, Any], *, asks: bool
    ) -> Marked:
        """Returns messages as text; if `asks` with the prompt for an answer, as a chat renders them."""
        more = {} if asks else {"add_generation_prompt": False}
        return rendered(self._texts, messages, {**variables, **more}, self._context)

    # --- by prefixes --------------------------------------------------------------------------------

    def _by_prefixes(
        self, messages: list[Message], wanted: Sequence[int], variables: Mapping[str, Any]
    ) -> CutConversation:
        samples: list[list[TextPiece]] = []
        last: _Answer | None = None
        skipped = beyond = closed = endless = unthought = 0
        for number, at in enumerate(wanted):
            before = messages[:at]
            prompt = self._rendered(before, variables, asks=True) if asks(before) else None
            if prompt and self._texts.control.exceeds(prompt, self._settings.cutoff_len):
                beyond = len(wanted) - number
                if self._settings.train_on_prompt and not samples:
                    samples.append([TextPiece(prompt, False)])
                break
            found = self._answer(prompt, messages, at, variables) if prompt else None
            if found is None:
                skipped += 1
                continue
            between = self._between(last, found) if last else None
            if between is not None:
                samples[-1].append(TextPiece(between, False, ends=True))
            else:
                _close(samples, last)
                samples.append([TextPiece(found.prompt, False)])
            samples[-1].append(TextPiece(found.said, True))
            closed, endless = closed + found.closed, endless + (not found.stop)
            unthought += found.unthought
            last = found
        _close(samples, last)
        return CutConversation(
            tuple(map(tuple, samples)), skipped, beyond, closed, endless, unthought
        )

    def _answer(
        self, prompt: Marked, messages: list[Message], at: int, variables: Mapping[str, Any]
    ) -> _Answer | None:
        """Returns the answer that a message is; None: the template does not render it behind its prompt."""
        whole = self._rendered(messages[: at + 1], variables, asks=False)
        closed = False
        if whole.text.startswith(prompt.text):
            said: Marked | None = _behind(whole, len(prompt.text))
        else:
            said = self._closing(prompt, whole, messages[at])
            closed = said is not None
        if said is None:
            other = [*messages[:at], {"role": "assistant", "content": ANSWER_MARKS[0]}]
            said = self._behind_turn(prompt, whole, self._rendered(other, variables, asks=False))
        if said is None or not said.text:
            return None
        said, unthought = self._thinking(prompt, said, messages[at])
        end, stop = self._stop_in(said.marked)
        if stop:
            said = Marked(said.marked[:end], said.mark)
        else:
            stop = self._next_turn["tool_calls" in messages[at]]
        return _Answer(prompt, said, stop, closed, unthought) if said.text else None

    @cached_property
    def _next_turn(self) -> tuple[str, str]:
        """The tokens with which the turns behind an answer and behind a call begin, where these end an answer: some
        templates write no other. Empty: they do not."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        ways: tuple[tuple[Message, Message], ...] = (
            ({"content": "…"}, {"role": "user", "content": "…"}),
            ({"content": "", "tool_calls": [call]}, {"role": "tool", "content": "…", "name": "f"}),
        )
        behind, behind_call = (self._stop_between(*way) for way in ways)
        return behind, behind_call

    def _stop_between(self, answer: Message, next_turn: Message) -> str:
        """Returns the token that a turn behind an answer begins with, if it ends an answer; else an empty text."""
        said: list[Message] = [
            {"role": "user", "content": "…"},
            {"role": "assistant", **answer},
        ]
        try:
            variables = template_variables(self._texts, self._settings)
            whole = self._rendered(said, variables, asks=False).text
            more = self._rendered([*said, next_turn], variables, asks=False)
        except ConversationRefused:
            return ""
        is_behind = more.text.startswith(whole)
        return self._stop_at(_behind(more, len(whole)).marked) if is_behind else ""

    def _between(self, last: _Answer, found: _Answer) -> Marked | None:
        """Returns what stands between the end of an answer and the next one; None: the text before that is another,
        or nothing ends the first answer."""
        if not found.prompt.text.startswith(last.text):
            return None
        between = _behind(found.prompt, len(last.text))
        return between if self._stop_at(between.marked) else None

    def _stop_in(self, marked: str) -> tuple[int, str]:
        """Returns the place of the first token in a text that ends an answer, and its text; empty: there is none.

        Words of a conversation that look like one have a mark inside.
        """
        places = [(marked.find(stop), stop) for stop in self._stops]
        found = [(place, -len(stop), stop) for place, stop in places if place >= 0]
        place, _, stop = min(found, default=(0, 0, ""))
        return place, stop

    def _stop_at(self, marked: str) -> str:
        """Returns the token that a text begins with, if it ends an answer; else an empty text."""
        return next((stop for stop in self._stops if marked.startswith(stop)), "")

    def _closing(self, prompt: Marked, whole: Marked, answer: Message) -> Marked | None:
        """Returns an answer behind a prompt that ends in a thought, which the template writes otherwise, or not at all,
        where the answer was given: the thought, its end, and the answer. None: this is not the case.

        Behind a thought of no words, as where thinking is switched off, those of the answer are left out.
        """
        opens = _OPENS.search(prompt.text)
        if opens is None or not whole.text.startswith(prompt.text[: opens.start()]):
            return None
        inside = _ANY_THOUGHT.match(whole.text, opens.start())
        at, gap = inside.end() if inside else opens.start(), opens[1]
        if opens[2]:
            return _behind(whole, at + len(opens[3]) * whole.text.startswith(opens[3], at))
        if inside:
            at += len(whole.text[at:]) - len(whole.text[at:].lstrip())
        lead = f"{_thought(answer)}{gap}</think>{gap}{gap}"
        return self._led(prompt, lead, _behind(whole, at))

    def _thinking(self, prompt: Marked, said: Marked, answer: Message) -> tuple[Marked, bool]:
        """Returns an answer with its thoughts, and whether they are missing: some templates write a thought of no words
        instead, and some nothing."""
        thought = _thought(answer)
        if self._settings.enable_thinking is False or not thought or thought in said.text:
            return said, False
        empty = _NO_THOUGHT.match(said.text)
        if empty is None:
            return said, True
        lead = f"{empty[1]}{empty[2]}{thought}{empty[2]}{empty[3]}"
        found = self._led(prompt, lead, _behind(said, empty.end()))
        return (said, True) if found is None else (found, False)

    def _led(self, prompt: Marked, lead: str, rest: Marked) -> Marked | None:
        """Returns the rest of an answer behind a text that the model says first; None: there is no mark for both."""
        begun = _behind(self._texts.control.joined(prompt, lead), len(prompt.text))
        if begun.mark in rest.text:
            return None
        marked = rest.marked.replace(rest.mark, begun.mark) if rest.mark else rest.marked
        return Marked(begun.marked + marked, begun.mark)

    def _behind_turn(self, prompt: Marked, whole: Marked, other: Marked) -> Marked | None:
        """Returns the answer in a conversation that the template writes otherwise before it, too, as where a system
        text stands in the last question: it begins behind the end of the prompt, where another answer would. None:
        there is no such place."""
        last = max(self._texts.control.places(prompt.text), default=-_TAIL)
        tail, pairs = prompt.text[last:], enumerate(zip(whole.text, other.text, strict=False))
        alike = whole.text[: next((at for at, (one, two) in pairs if one != two), 0)]
        for count in range(min(_MOST_LED, len(alike)) + 1):
            if alike[: len(alike) - count].endswith(tail):
                return _behind(whole, len(alike) - count)
        return None

    # --- by tags ------------------------------------------------------------------------------------

    def _by_tags(
        self, messages: list[Message], wanted: list[int], variables: Mapping[str, Any]
    ) -> list[TextPiece] | None:
        """Returns the pieces that the template's tags say; None: they do not say it of the answers that are wanted."""
        with self._texts.template.answers_marked():
            pieces = _marked_pieces(self._rendered(messages, variables, asks=False))
            count = sum(piece.trained for piece in pieces)
            if not count:
                return None
            answers = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
            if answers == wanted:
                return pieces
            chosen: list[bool] = []
            # The number of marked pieces up to each answer says which are its own.
            for at in answers:
                shown = _marked_pieces(self._rendered(messages[: at + 1], variables, asks=False))
                own = sum(piece.trained for piece in shown) - len(chosen)
                chosen += [at in wanted] * own
        if len(chosen) != count:
            return None
        which = iter(chosen)
        return [replace(piece, trained=piece.trained and next(which)) for piece in pieces]


def template_variables(
    texts: TextModel, settings: SampleSettings, tools: Sequence[Message] = ()
) -> dict[str, Any]:
    """Returns the variables that the chat template is given for a sample, by name: those of thinking, and `tools` if
    there are any.
    """
    variables = replace(texts.settings, thinking=settings.enable_thinking).variables
    return {**variables, "tools": list(tools)} if tools else variables


def _marked_pieces(whole: Marked) -> list[TextPiece]:
    """Returns the pieces of a text with ANSWER_MARKS, without them."""
    pieces: list[TextPiece] = []
    trained = False
    for part in _MARKS.split(whole.marked):
        if part in ANSWER_MARKS:
            trained = part == ANSWER_MARKS[0]
        elif part:
            pieces.append(TextPiece(Marked(part, whole.mark), trained))
    return pieces


def _behind(text: Marked, at: int) -> Marked:
    """Returns the rest of a text from a character on."""
    return text.parts([at])[0]


def _close(samples: list[list[TextPiece]], last: _Answer | None) -> None:
    """Puts the token behind the last answer that ends it."""
    if samples and last is not None and last.stop:
        samples[-1].append(TextPiece(Marked(last.stop), False, ends=True))


def _thought(answer: Message) -> str:
    """Returns the thoughts of an answer; empty: it has none."""
    for name in REASONING:
        if answer.get(name):
            return str(answer[name]).strip()
    found = THOUGHT.match(str(answer.get("content") or ""))
    return found[1].strip() if found else ""
