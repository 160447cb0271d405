"""Explains why a conversation's cache could not be used: at which token the ids differ, and which part that is.

Pure functions over what was read before and what is read now: ids, and the messages that they were made from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import groupby
from typing import Any

from ktcli.native.library import PAGE_TOKENS
from ktcli.records import dataclass

SHOWN = 24  # characters of each side of a difference
_DATE = r"\b(19|20)\d\d\b|\d\d:\d\d|\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_THOUGHT_ENDS = ("</think>", "</thinking>", "[/THINK]")
_THOUGHTS = ("<think>", *_THOUGHT_ENDS, "<|channel|>analysis")

Message = tuple[str, str]  # role and content
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The ids that a model has read, and the messages that they encode.

    Attributes:
        messages: role and content of each message, the system text first if there is one.
        variables: what the template was given beside them: tools, whether to think.
        model: the model's name for people, and the identity of its conversion.
        depths: how each id was computed, a byte for each, see `engine.forms`; those behind were not.
    """

    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    model: tuple[str, str] = ("", "")
    depths: bytes = b""

    def answered(self, text: str, ids: Sequence[int], depths: bytes = b"") -> Timeline:
        """Returns a copy of the timeline, the ids and messages that a model has read, with an answer appended.

        Args:
            depths: for each id of the new timeline a byte that says how it was computed, see `engine.forms`.
        """
        messages = (*self.messages, ("assistant", text))
        return replace(self, ids=(*self.ids, *ids), messages=messages, depths=depths)


@dataclass(frozen=True, slots=True)
class Loss:
    """Cached tokens that could not be reused.

    Attributes:
        at: the first token of the new prompt that is not the one before; or to which the engine had to go back.
        tokens: the tokens that were cached and had to be computed again or were dropped.
        why: a clause for people.
    """

    at: int
    tokens: int
    why: str

    @property
    def sentence(self) -> str:
        """A sentence for people on the loss: from which token on, how many tokens, and why."""
        return f"the cache was lost from token {self.at:,} on ({self.tokens:,} tokens): {self.why}"


def depth_runs(depths: bytes) -> list[list[int]]:
    """Returns the bytes `depths` in run-length encoding: a pair [number of equal bytes, byte] for each run."""
    return [[len(list(same)), depth] for depth, same in groupby(depths)]


def common(before: Sequence[int], now: Sequence[int]) -> int:
    """Returns the number of leading ids that two sequences have in common."""
    least = min(len(before), len(now))
    return next((i for i in range(least) if before[i] != now[i]), least)


def lost(before: Timeline, now: Timeline, reused: int, decode: Decode) -> Loss | None:
    """Returns which cached tokens the second of two prompts of a conversation cannot reuse: from which token on, how
    many, and why; None if it reuses all, or all but the last few, less than a page.

    Args:
        before: what was read and answered last.
        reused: the number of tokens of `now` that the engine had already.
        decode: returns the text of ids, control tokens written out.
    """
    if before.model != now.model:
        at = min(reused, len(before.ids))
        return Loss(at, len(before.ids) - at, _other_model(before.model, now.model))
    same = common(before.ids, now.ids)
    if same < len(before.ids) and same < len(now.ids):
        return Loss(same, len(before.ids) - same, _difference(before, now, same, decode))
    whole = min(same, len(now.ids) - 1)
    if same < len(before.ids) - 1:
        return Loss(same, len(before.ids) - same, "what followed was undone")
    # Whole pages are kept, and the last id of an answer is handed out before it is computed.
    if reused <= min(whole, len(before.ids) - 1) - PAGE_TOKENS:
        why = "no later state or page of it was cached"
        if reused == 0:
            why = "none of it was cached in memory or on disk"
        return Loss(reused, whole - reused, why)
    return None


def _other_model(before: tuple[str, str], now: tuple[str, str]) -> str:
    if before[0] != now[0]:
        return f"it was computed by another model, {before[0] or 'an unknown one'}"
    return f"it was computed by another conversion of {now[0]}"


def _difference(before: Timeline, now: Timeline, same: int, decode: Decode) -> str:
    """Returns the reason why the ids differ from the place `same` on."""
    old, new = decode(before.ids), decode(now.ids)
    start = len(decode(now.ids[:same]))
    tokens = (before.ids[same : same + 1], now.ids[same : same + 1])
    at = common_letters(old, new)
    was, is_ = _Places(old, before.messages), _Places(new, now.messages)
    if at >= start + max(len(decode(token)) for token in tokens):
        return f"{is_.name(start)} is split into different tokens than before"
    shown = f": {_snippet(old, at)} became {_snippet(new, at)}"
    return _reason(before, now, was, is_, at) + shown


def _reason(before: Timeline, now: Timeline, was: _Places, is_: _Places, at: int) -> str:
    systems = [_system(timeline.messages) for timeline in (before, now)]
    if systems[0] != systems[1] and at <= max(was.end_of_system, is_.end_of_system):
        return "the system text changed"
    was_given, given = before.variables, now.variables
    changed = sorted(k for k in {*was_given, *given} if was_given.get(k) != given.get(k))
    edited = _first_edited(before.messages, now.messages)
    place = is_.index(at)
    if changed and (edited is None or place < edited):
        other = f"the template received a different {changed[0]}"
        return "the tools changed" if "tools" in changed else other
    if edited is not None and max(place, was.index(at)) >= edited:
        return f"{name_of(now.messages, edited)} has changed"
    if place < len(now.messages) and now.messages[place][0] == "assistant":
        return _rewritten(name_of(now.messages, place), was.around(place), is_.around(place))
    if place <= len(now.messages[:1]) and at < is_.start_of_talk:
        what = "a date or time" if _dated(was.text, is_.text, at) else "its beginning"
        return f"the template writes {what} differently"
    return f"the template writes something else before {name_of(now.messages, place)}"


def _rewritten(name: str, old: str, new: str) -> str:
    """Returns the reason why an answer is written otherwise, although its text is the same."""
    if any(old.count(mark) > new.count(mark) for mark in _THOUGHTS):
        return f"the template leaves out the thoughts of {name}"
    return f"the template writes {name} differently from the model"


def common_letters(old: str, new: str) -> int:
    """Returns the number of leading characters that two texts have in common."""
    least = min(len(old), len(new))
    if old[:least] == new[:least]:
        return least
    first, last = 0, least
    while last - first > 1:  # the first difference lies in [first, last)
        middle = (first + last) // 2
        first, last = (middle, last) if old[first:middle] == new[first:middle] else (first, middle)
    return first


def _dated(old: str, new: str, at: int) -> bool:
    around = slice(max(0, at - SHOWN), at + SHOWN)
    return bool(re.search(_DATE, old[around]) and re.search(_DATE, new[around]))


def _snippet(text: str, at: int) -> str:
    first = max(0, at - SHOWN // 2)
    shown = " ".join(text[first : at + SHOWN].split())
    return f'"{"…" if first else ""}{shown}{"…" if at + SHOWN < len(text) else ""}"'


def _system(messages: Sequence[Message]) -> str:
    return next((content for role, content in messages if role == "system"), "")


def _first_edited(before: Sequence[Message], now: Sequence[Message]) -> int | None:
    """Returns the first message that is another one than before; None if those of before are all there."""
    for index, message in enumerate(before):
        if index >= len(now):
            return None
        if now[index] != message:
            return index
    return None


def name_of(messages: Sequence[Message], index: int) -> str:
    """Returns a message's name for people: "question 2", "answer 1", "the system text"."""
    if index >= len(messages):
        return "the end"
    role = messages[index][0]
    count = sum(1 for each, _ in messages[: index + 1] if each == role)
    return {"user": f"question {count}", "assistant": f"answer {count}", "system": "the system text"}.get(
        role, f"message {index + 1}"
    )  # fmt: skip


class _Places:
    """Finds the messages in a rendered text."""

    def __init__(self, text: str, messages: Sequence[Message]) -> None:
        self.text, self._messages = text, messages
        self._spans: list[tuple[int, int]] = []
        end = 0
        for role, content in messages:
            first, last = _span(text, content, end, answer=role == "assistant")
            self._spans.append((first, last))
            end = last

    @property
    def end_of_system(self) -> int:
        """The end of the system text, of the template's beginning if there is none."""
        if self._messages and self._messages[0][0] == "system":
            return self._spans[0][1]
        return self.start_of_talk

    @property
    def start_of_talk(self) -> int:
        """The place of the first question."""
        spans = zip(self._messages, self._spans, strict=True)
        return next((first for (role, _), (first, _) in spans if role == "user"), len(self.text))

    def index(self, at: int) -> int:
        """Returns the message that a place is in or, in the template's own text, before."""
        return next((i for i, (_, last) in enumerate(self._spans) if at < last), len(self._spans))

    def name(self, at: int) -> str:
        """Returns the name of the message that a place is in or before."""
        return name_of(self._messages, self.index(at))

    def around(self, index: int) -> str:
        """Returns the text of a message with what the template puts before it."""
        if index >= len(self._spans):
            return self.text[self._spans[-1][1] if self._spans else 0 :]
        first = self._spans[index - 1][1] if index else 0
        return self.text[first : self._spans[index][1]]


def _span(text: str, content: str, after: int, *, answer: bool) -> tuple[int, int]:
    """Returns the place of a message in a text; of an answer whose thoughts are not there, of what follows them; an
    empty span if the template writes it otherwise."""
    wanted = [content.strip()]
    if answer:
        wanted += [content.rpartition(end)[2].strip() for end in _THOUGHT_ENDS if end in content]
    for each in wanted:
        first = text.find(each, after) if each else -1
        if first >= 0:
            return first, first + len(each)
    return after, after
