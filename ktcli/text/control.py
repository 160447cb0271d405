"""Prevents words of a conversation from becoming control tokens: only a template's own text may produce those.

`<|im_end|>` in a question or a file is text like any other, and must not end the turn. So before a conversation is
rendered, each such word in it gets a *mark* behind its first character, one that no text holds; the tokenizer encodes
the stretches with marks without control tokens and leaves the marks out (`Tokenizer.encode_marked`). Words that only
come to be in the prompt, of several texts or of a text and letters of the template, are found by rendering once more
with marks wherever a text could be part of a word. Where nothing pretends, nothing is marked, and the ids are those of
the plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.text.codec import AddedToken
from ktcli.text.tokenizer import MAX_TOKEN_CHARS, Tokenizer
from ktcli.text.words import ControlWords

# Unicode says of these that no text is made of them; private characters stand in if a text is made of all of them.
# Each with the form that JSON may give it.
_MARKS = {chr(code): f"\\u{code:04x}" for code in range(0xFDD6, 0xFDF0)}
_MORE_MARKS = range(0x100000, 0x10FFFE)
# Added tokens that are not special, but mean something to the model: <tool_call>, </think>, [INST], ｜DSML｜ …
_MARKER = r"(?=\S*\w)(?=\S*[<>|｜\[\]])\S{3,}"
# Those are what they are in every text.
_HTML = (
    r"</?(a|b|blockquote|body|br|caption|code|div|em|footer|h[1-6]|hr|html|i|iframe|img|li|ol|p|pre|span|strong|sub|sup"
    r"|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)
# Fields of an answer that say something about it: its thoughts are part of what the template is told.
_THOUGHT = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")
# Fields and values that a template asks for; they are its own words, not a conversation's.
_FIELDS = frozenset(
    "role content name type function functions arguments parameters properties required description enum items default "
    "title format strict id tools tool_calls tool_call_id reasoning_content reasoning thinking text image documents "
    "anyOf oneOf allOf additionalProperties nullable minimum maximum return".split()
)
_ROLES = frozenset(
    "system developer user assistant tool function ipython observation environment model".split()
)
_TYPES = frozenset("function text image object string number integer boolean array null".split())
_OWN_VALUES = {"role": _ROLES, "type": _TYPES}

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered conversation.

    Attributes:
        marked: the text with marks.
        mark: the character that marks; empty: there are no marks.
    """

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The rendered conversation without the mark characters that keep words from becoming control tokens."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def parts(self, cuts: Sequence[int]) -> list[Marked]:
        """Returns the parts of the rendered text, each from a position in `cuts` to the next one, the last one to the
        end; positions ascend and count characters without marks.
        """
        ends = self._places(cuts)
        return [
            Marked(self.marked[first:last], self.mark)
            for first, last in zip(ends, [*ends[1:], len(self.marked)], strict=True)
        ]

    def _places(self, cuts: Sequence[int]) -> list[int]:
        """Returns the places in the text with marks of characters of the text without them, ascending; behind marks
        there."""
        if not (self.mark and self.mark in self.marked):
            return [min(cut, len(self.marked)) for cut in cuts]
        found, plain, at = [], 0, 0
        wanted = iter(cuts)
        cut = next(wanted, None)
        for piece in self.marked.split(self.mark):
            while cut is not None and cut < plain + len(piece):
                found.append(at + cut - plain)
                cut = next(wanted, None)
            if cut is None:
                break
            plain, at = plain + len(piece), at + len(piece) + 1
        return found + [len(self.marked)] * (len(cuts) - len(found))


class ControlTokens:
    """The control tokens of a tokenizer, and the encoding by which texts of users do not give them.

    Args:
        tokenizer: the model's tokenizer.
        allowed: whether texts may give them all the same (`--allow-special`).
    """

    def __init__(self, tokenizer: Tokenizer, *, allowed: bool = False) -> None:
        self._tokenizer = tokenizer
        told = [] if allowed else [token for token in tokenizer.added if _is_control(token)]
        self.ids = frozenset(token.id for token in told)
        in_answers = [t.text for t in told if t.special and not _THOUGHT.fullmatch(t.text)]
        self._everywhere = ControlWords(token.text for token in told)
        self._in_answers = ControlWords(in_answers)
        self._of_answers = ControlWords({token.text for token in told}.difference(in_answers))

    def render(
        self,
        render: Callable[[Sequence[Message], Mapping[str, Any]], str],
        messages: Sequence[Message],
        more: Mapping[str, Any],
        context: int = 1 << 30,
    ) -> Marked:
        """Returns a conversation rendered as text, with a mark character in words of its messages that only look like
        control tokens.

        Args:
            render: renders messages with further template variables as text.
            more: the further variables.
            context: tokens that the model can hold; a text of more than 64 characters for each is not searched for
                control tokens that two neighbouring texts make together.
        """
        mark = self._mark(messages, more)
        said, told = self._marked(messages, more, mark)
        text = render(said, told)
        guarded = self._guarded(said, told, mark)
        if guarded != (said, told) and len(text) <= MAX_TOKEN_CHARS * context:
            other = render(*guarded)
            if self._everywhere.found(other) != self._everywhere.found(text):
                text = other  # somewhere texts make a control token together
        # A template may write what is not ASCII as JSON does.
        escaped = _MARKS.get(mark) or json.dumps(mark)[1:-1]
        return Marked(text.replace(escaped, mark) if escaped in text else text, mark)

    def joined(self, rendered: Marked, text: str) -> Marked:
        """Returns a rendered conversation followed by a text that the model generated, with marks in words of that text
        that only look like control tokens.
        """
        mark = self._mark(rendered.text, text)
        said = rendered.marked.replace(rendered.mark, mark) if rendered.mark else rendered.marked
        return Marked(said + self._in_answers.marked(text, mark), mark)

    def encode(self, rendered: Marked) -> list[int]:
        """Returns the token ids of a rendered conversation; no word with a mark in it becomes a control token."""
        marks = bool(rendered.mark) and rendered.mark in rendered.marked
        if not marks and not (self._tokenizer.rewrites and self.ids):
            return self._tokenizer.encode(rendered.marked)
        return self._tokenizer.encode_marked(rendered.marked, rendered.mark, self.ids)

    def encode_text(self, text: str) -> list[int]:
        """Returns the token ids of a text outside any turn; words that look like control tokens become ordinary
        tokens, unless texts may contain control tokens.
        """
        mark = self._mark(text)
        return self.encode(Marked(self._everywhere.marked(text, mark), mark))

    def places(self, text: str) -> Iterator[int]:
        """Yields the positions, in characters, where the spelling of a control token begins in a text."""
        return self._everywhere.places(text)

    def exceeds(self, rendered: Marked, most: int) -> bool:
        """Returns whether a rendered conversation certainly has more than `most` tokens, without encoding all of it;
        False is no certainty.
        """
        mark = rendered.mark
        return self._tokenizer.exceeds(
            rendered.marked, most, lambda part: self.encode(Marked(part, mark))
        )

    def _mark(self, *values: Any) -> str:
        """Returns a character that is in none of the texts, nor is the form that JSON may give it.

        Raises:
            UsageError: the texts hold every character that could be one.
        """
        texts = _texts(values)
        free = (
            mark
            for mark, escaped in _MARKS.items()
            if not any(mark in text or escaped in text for text in texts)
        )
        mark = next(free, "")
        if not mark:
            letters = frozenset().union(*map(frozenset, texts))
            mark = next((chr(code) for code in _MORE_MARKS if chr(code) not in letters), "")
        if not mark:
            raise UsageError("the conversation uses every private-use character of Unicode")
        return mark

    def _marked(
        self, messages: Sequence[Message], more: Mapping[str, Any], mark: str
    ) -> tuple[list[Message], dict[str, Any]]:
        """Returns a conversation with marks in its control words."""
        everywhere = lambda text: self._everywhere.marked(text, mark)  # noqa: E731
        in_answers = lambda text: self._in_answers.marked(text, mark)  # noqa: E731
        said = [_each(each, in_answers if _is_answer(each) else everywhere) for each in messages]
        return said, {key: _each(value, everywhere) for key, value in more.items()}

    def _guarded(
        self, messages: Sequence[Message], more: Mapping[str, Any], mark: str
    ) -> tuple[list[Message], dict[str, Any]]:
        """Returns a marked conversation with further marks wherever a text could be part of a control word."""

        def everywhere(text: str) -> str:
            return self._everywhere.guarded(text, mark)

        def in_answers(text: str) -> str:
            parts = _THOUGHT.split(text)  # every second one is a tag
            parts[::2] = (
                self._everywhere.guarded(part, mark, list(self._of_answers.places(part)))
                for part in parts[::2]
            )
            return "".join(parts)

        said = [
            _each(each, in_answers if _is_answer(each) else everywhere, own=True)
            for each in messages
        ]
        return said, {key: _each(value, everywhere, own=True) for key, value in more.items()}


def _is_control(token: AddedToken) -> bool:
    """Returns whether a token means something to the model that a text must not say."""
    told = token.special or (
        re.fullmatch(_MARKER, token.text) and not re.fullmatch(_HTML, token.text)
    )
    # A word of one character cannot be cut; no published tokenizer has one.
    return bool(told) and len(token.text) > 1


def _is_answer(message: Message) -> bool:
    return message.get("role") == "assistant"


def _each(value: Any, put: Callable[[str], str], *, own: bool = False) -> Any:
    """Returns nested plain values with `put` applied to every text in them, names of fields included.

    Args:
        own: whether the fields and values that templates ask for are left as they are.
    """
    if isinstance(value, str):
        return put(value)
    if isinstance(value, (dict, Mapping)):
        return {
            str(key) if own and str(key) in _FIELDS else put(str(key)): (
                part if own and _is_own(key, part) else _each(part, put, own=own)
            )
            for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_each(part, put, own=own) for part in value]
    return value


def _is_own(key: Any, value: Any) -> bool:
    return isinstance(value, str) and value in _OWN_VALUES.get(str(key), ())


def _texts(value: Any) -> list[str]:
    """Returns every text in nested plain values, in any order."""
    found: list[str] = []
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, (dict, Mapping)):
            found += map(str, part)
            todo += part.values()
        elif isinstance(part, (list, tuple)):
            todo += part
    return found
