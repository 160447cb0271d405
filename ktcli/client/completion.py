"""One answer of a server, from the chunks of its stream to what is shown and remembered of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any

from ktcli.answers.calls.styles import GENERIC
from ktcli.answers.events import AnswerPiece
from ktcli.answers.stream import Thinking, ThoughtMarks
from ktcli.engine.request import Finish, Stats
from ktcli.errors import ServerFailed
from ktcli.records import dataclass
from ktcli.text.files import without_surrogates

_FINISH = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "function_call": Finish.STOP,
    "length": Finish.LENGTH,
}
_THOUGHTS = ("reasoning_content", "reasoning")  # two names of one thing; some servers send both
_MOST_CALLS = 256
_MOST_COUNT = 1 << 31


@dataclass(slots=True)
class _Call:
    """A call of a tool, as far as it came."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Completion:
    """An answer of a server, while it is streamed and afterwards.

    Attributes:
        clock: returns seconds.
        text: what the conversation remembers: without thoughts that came apart from it.
        ids: none are known.
        stats: its counts, which are those of the server once it says them, and times as they were waited for here.
        finish: why it ended; None: it has not, or nobody said.
        early: the reason that the server gives for an answer that is not whole; empty: it is.
        model: the model that the server says has answered; empty: it does not say.
        changed: another model that it named in the same answer; empty: none.
    """

    clock: Callable[[], float] = time.monotonic
    text: str = ""
    ids: Sequence[int] = ()
    stats: Stats = field(default_factory=Stats)
    finish: Finish | None = None
    early: str = ""
    model: str = ""
    changed: str = ""
    thought_cut: bool = False
    _calls: list[_Call] = field(default_factory=list)
    _open: dict[int, _Call] = field(default_factory=dict)  # the last call of each index
    _thinking: Thinking = field(default_factory=lambda: Thinking(once=True))
    _marks: ThoughtMarks = field(default_factory=ThoughtMarks)
    _apart: bool = False  # thoughts came in a field of their own
    _began_s: float = 0.0
    _first_s: float | None = None

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def depths_of(self, start: int, end: int | None = None) -> bytes:
        """Always returns b"": how many experts a server deferred (computed a layer late) for an id is not known."""
        return b""

    def take(self, document: dict[str, Any]) -> list[AnswerPiece]:
        """Processes one chunk (a JSON object) of a server's streamed chat completion; returns the pieces of text and
        thoughts that it adds, [] if there are none.
        """
        self._note_model(document.get("model"))
        self._count(document.get("usage"))
        choices = document.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            return []
        delta = choice.get("delta")
        pieces = self._said(delta) if isinstance(delta, dict) else []
        if said := choice.get("finish_reason"):
            self.finish = _FINISH.get(said) if isinstance(said, str) else None
            self.early = "" if self.finish else str(said)[:100]
        return pieces

    def end(self) -> list[AnswerPiece]:
        """Ends the answer, after the last chunk; returns its last pieces: text that was held back, and tool calls as
        text.
        """
        rest = self._shown(self._thinking.finish())
        calls = "\n".join(map(_written, self._calls))
        if calls:
            gap = "\n" if self.text and not self.text.endswith("\n") else ""
            self.text += f"{gap}{calls}"
            rest.append(AnswerPiece(f"{gap}{calls}"))
        self.finish = self.finish or Finish.STOP
        return rest

    def _said(self, delta: dict[str, Any]) -> list[AnswerPiece]:
        thought = next((said for name in _THOUGHTS if (said := _text(delta.get(name)))), "")
        said = _text(delta.get("content")) or _text(delta.get("refusal"))
        calls = delta.get("tool_calls")
        called = self._note_calls(calls) if isinstance(calls, list) else False
        if thought or said or called:
            self._tick()
        pieces = [AnswerPiece(thought, True)] if thought else []
        self._apart = self._apart or bool(thought)
        if said:
            self.text += said
            # A server that does not tell thoughts from answers writes them as its model does.
            plain = [(False, said)] if self._apart else self._thinking.feed(said)
            pieces += self._shown(plain)
        return pieces

    def _shown(self, parts: Iterable[tuple[bool, str]]) -> list[AnswerPiece]:
        if self._apart:
            return [AnswerPiece(text) for _, text in parts]
        return list(self._marks.without(AnswerPiece(text, thought) for thought, text in parts))

    def _note_calls(self, deltas: list[Any]) -> bool:
        """Adds to the calls of tools; returns whether anything came."""
        for delta in deltas:
            function = delta.get("function") if isinstance(delta, dict) else None
            index = (delta.get("index") or 0) if isinstance(delta, dict) else None
            if not isinstance(function, dict) or type(index) is not int:
                continue
            id, name = _text(delta.get("id")), _text(function.get("name"))
            call = self._call_of(index, id, name)
            call.id, call.name = call.id or id, call.name or name
            arguments = function.get("arguments")
            call.arguments += (
                json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments)
            )
        return bool(self._calls)

    def _call_of(self, index: int, id: str, name: str) -> _Call:
        """Returns the call that a delta belongs to. Some servers give all calls the same index, so another id with a
        name begins another one; an id alone does not, since some draw a new one for each delta."""
        call = self._open.get(index)
        if call is None or (name and id and call.id and id != call.id):
            if len(self._calls) >= _MOST_CALLS:
                raise ServerFailed(f"the answer has more than {_MOST_CALLS} calls of tools")
            call = self._open[index] = _Call()
            self._calls.append(call)
        return call

    def _tick(self) -> None:
        """Notes the time of a piece, which counts as a token until the server says how many there were."""
        now = self.clock()
        if self._first_s is None:
            self._first_s, self.stats.prompt_s = now, now - self._began_s
        self.stats.tokens += 1
        self.stats.eval_s = now - self._first_s

    def _note_model(self, name: Any) -> None:
        if isinstance(name, str) and name:
            self.model = self.model or name
            self.changed = name if name != self.model else self.changed

    def _count(self, usage: Any) -> None:
        """Takes the counts of the server, if they can be true."""
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt, said = _number(usage.get("prompt_tokens")), _number(usage.get("completion_tokens"))
        if prompt is not None:
            self.stats.prompt_tokens = prompt
            self.stats.reused_tokens = min(prompt, _number(cached) or 0)
        if said is not None:
            self.stats.tokens = said


def _written(call: _Call) -> str:
    """Returns a call as the text that a model writes for one: there is nobody to run it."""
    arguments = call.arguments.strip() or "{}"
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{GENERIC.begin}\n{{"name": {name}, "arguments": {arguments}}}\n{GENERIC.end}'


def _text(value: Any) -> str:
    return without_surrogates(value) if isinstance(value, str) else ""


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_COUNT else None
