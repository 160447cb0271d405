"""Compiles grammars for a model's tokenizer, and follows answers through them, both with llguidance.

What a client sends is compiled within limits: bytes and depth are checked before (form.py, schema.py), the size of the
automata while it is done, and whoever waits for it gives up after `COMPILE_S` seconds. Compiled grammars are kept, the
latest of them, since clients send the same schema again and again.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from ktcli.answers.calls.styles import CallStyle
from ktcli.answers.channels import Channels
from ktcli.answers.format import AnswerFormat
from ktcli.answers.grammar.distinct import DistinctItems, Held
from ktcli.answers.grammar.form import AnswerConstraint, Form
from ktcli.answers.grammar.tokentable import TokenTable
from ktcli.answers.grammar.vocabulary import read_vocabulary, token_bytes
from ktcli.answers.grammar.whole import USUAL, Frame, Shape, grammar_of
from ktcli.errors import KtError, UsageError
from ktcli.text.tokenizer import Tokenizer
from ktcli.threadpool import Threads

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")

COMPILE_S = 10.0  # llguidance's own limits end almost everything within one
GRAMMAR_CHARS = 1 << 20  # of all schemas that one answer is held to
KEPT = 64  # compiled grammars
KEPT_CHARS = 4 << 20  # of their texts
# llguidance's limits: what is built once, and what each token may take (about 15 ms).
_GRAMMAR_SYMBOLS = 500_000
_LEXER_STATES = 100_000
_LEXER_FUEL, _STEP_FUEL = 1_000_000, 200_000
_ROW_ITEMS, _STEP_ITEMS = 10_000, 50_000


def require_sound(form: Form) -> None:
    """Raises an error if no model's answer could be constrained to a form; to be called before a model is loaded.

    Raises:
        UsageError: the form is invalid, or beyond a limit.
    """
    import llguidance

    grammars = json.dumps({"grammars": [form.part("body")]})
    if why := llguidance.LLMatcher.validate_grammar(grammars, None, limits=_limits()):
        raise _unusable(form.field, why)


class GrammarConstraint:
    """The state of a grammar along one answer; see `ktcli.engine.constraint.Constraint`.

    Args:
        size: the ids of a mask.
        distinct: what keeps the items of arrays apart; None: nothing has to.
    """

    ready = True

    def __init__(
        self, matcher: llguidance.LLMatcher, size: int, distinct: DistinctItems | None = None
    ) -> None:
        self._matcher, self._distinct = matcher, distinct
        self._mask = np.zeros(-(-size // 32), dtype=np.uint32)
        self.error: KtError | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete by its grammar, so that nothing but its end can follow."""
        return self.error is None and bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.uint32]:
        """Returns the bit mask of the ids that may come next, uint32 [ceil(vocabulary / 32)], the lowest id in the
        lowest bit; after an error, all are 0.
        """
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            self._check()
        if self._distinct is not None and self.error is None:
            self._distinct.limit(self._mask)
            if not self._mask.any():
                self.error = _stuck("no other item is possible in an array of unique items")
        if self.error is not None:
            self._mask[:] = 0
        return self._mask

    def take(self, id: int) -> None:
        """Advances the grammar by an id of the answer; sets `error` if the answer cannot go on with it."""
        if self.error is None:
            self._matcher.consume_token(id)
            self._check()
        if self._distinct is not None and self.error is None and not self.ended:
            try:
                self._distinct.take(id)
            except (ValueError, RecursionError):  # json's own limits
                self.error = _stuck("an item of an array of unique items is too large or too deep")
            if self._distinct.repeated:
                self.error = _stuck("an array of unique items has one twice")

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = _stuck(_sentence(self._matcher.get_error()))


class LateConstraint:
    """A placeholder for a constraint that is still being compiled; who waits for it calls `become`, or cancels the
    request.
    """

    def __init__(self) -> None:
        self._made: GrammarConstraint | None = None

    def become(self, made: GrammarConstraint) -> None:
        """Sets the compiled constraint, which all other methods then use; callable from any thread."""
        self._made = made

    @property
    def ready(self) -> bool:
        """Whether the constraint is compiled."""
        return self._made is not None

    @property
    def error(self) -> KtError | None:
        """The reason why no id of the answer can follow any more; None if one can, or the constraint is not compiled
        yet.
        """
        return self._made.error if self._made else None

    @property
    def ended(self) -> bool:
        """Whether the constraint is compiled and the answer is complete by its grammar."""
        return self._made is not None and self._made.ended

    def mask(self) -> NDArray[np.uint32]:
        """Returns the compiled constraint's bit mask of the ids that may come next, uint32 [ceil(vocabulary / 32)]."""
        return self._known.mask()

    def take(self, id: int) -> None:
        """Advances the compiled constraint by an id of the answer."""
        self._known.take(id)

    @property
    def _known(self) -> GrammarConstraint:
        assert self._made is not None, "the scheduler waits until it is ready"
        return self._made


class GrammarCompiler:
    """Compiles grammars for one model; any thread may call it.

    Args:
        size: the logits of a row.
        frame: the marks of an answer's parts.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: Collection[int], size: int, frame: Frame = USUAL
    ) -> None:
        self._tokenizer, self._stop_ids, self._size = tokenizer, stop_ids, size
        self._frame = frame
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, answers: AnswerFormat, size: int) -> GrammarCompiler:
        """Returns the grammar compiler for a model with this answer format, whose logits have `size` columns."""
        texts = answers.texts
        return cls(texts.tokenizer, texts.stop_ids, size, Frame.of(answers.template))

    @cached_property
    def _workers(self) -> Threads:
        return Threads(2, "kt-grammar")

    def prepare(self) -> Future[None]:
        """Starts reading the model's vocabulary on another thread, unless it was read before; returns a future that is
        done once it is read.
        """
        return self._workers.submit(self._read)

    def ask(self, compile: Callable[[], T]) -> Future[T]:
        """Calls a function on a thread of this compiler; returns the future of its result."""
        return self._workers.submit(compile)

    def constraints(
        self, shape: Shape, style: CallStyle | None, prompt: str | None, count: int = 1
    ) -> list[GrammarConstraint]:
        """Returns `count` grammar constraints, each with a state of its own, that hold answers to a form.

        Args:
            shape: the text or the tool calls that each answer must consist of.
            style, prompt: see `grammar_of`.
        Raises:
            UsageError: the form is invalid or beyond a limit, or this model's answers cannot be held to it.
        """
        grammar = grammar_of(shape, self._tokenizer, style, prompt, self._frame)
        if len(grammar) > GRAMMAR_CHARS:
            raise UsageError(f"{shape.field} requires schemas of more than {GRAMMAR_CHARS:,} bytes")
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        if found is None:
            found = self._compiled(grammar, shape.field)
            self._keep(grammar, found)
        held = shape.form.held if shape.form is not None else {}
        return [
            GrammarConstraint(found.deep_copy(), self._size, self._distinct(shape, held, prompt))
            for _ in range(count)
        ]

    def _distinct(self, shape: Shape, held: Held, prompt: str | None) -> DistinctItems | None:
        """Returns what keeps apart the items of one answer's arrays; None: nothing has to.

        Raises:
            UsageError: it is not known where the JSON of such an answer begins.
        """
        if not held:
            return None
        if prompt is not None and Channels.known_to(self._tokenizer):
            raise UsageError(f"{shape.field}: this model's answers cannot be held to uniqueItems")
        begin, end = (mark.strip() for mark in self._frame.thought)
        inside = prompt is not None and bool(begin) and prompt.rstrip().endswith(begin)
        return DistinctItems(
            held, self._table, (begin, end) if prompt and begin else None, inside=inside
        )

    def constraint(self, wanted: AnswerConstraint) -> GrammarConstraint:
        """Returns the grammar constraint of an answer, advanced by those ids of the answer that the prompt already
        has.

        Raises:
            UsageError: as `constraints`.
        """
        (made,) = self.constraints(Shape(wanted.form), None, wanted.prompt)
        for id in wanted.said:
            made.take(id)
        return made

    def close(self) -> None:
        """Ends the compiler's threads, without waiting for what they are at; work that has not begun is cancelled."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> None:
        with self._lock:
            _ = self._vocabulary

    @cached_property
    def _table(self) -> TokenTable:
        return TokenTable(token_bytes(self._tokenizer, self._stop_ids, self._size))

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        return read_vocabulary(self._tokenizer, self._stop_ids, self._size)

    def _compiled(self, grammar: str, field: str) -> llguidance.LLMatcher:
        import llguidance

        self._read()
        made = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=_limits())
        if not made.is_error():
            made.compute_bitmask()  # what is too complex shows here first
        if made.is_error():
            raise _unusable(field, made.get_error())
        return made

    def _keep(self, grammar: str, made: llguidance.LLMatcher) -> None:
        with self._lock:
            if self._kept.pop(grammar, None) is None:
                self._chars += len(grammar)
            self._kept[grammar] = made
            while len(self._kept) > KEPT or self._chars > KEPT_CHARS:
                old, _ = self._kept.popitem(last=False)
                self._chars -= len(old)


_PATTERN, _WHY = "regex parse error:", "error: "


def _limits() -> llguidance.LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(
        max_items_in_row=_ROW_ITEMS,
        initial_lexer_fuel=_LEXER_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def _stuck(why: str) -> UsageError:
    return UsageError(f"the answer cannot continue in the requested format: {why}")


def _unusable(field: str, why: str) -> UsageError:
    return UsageError(f"{field} cannot be used: {_sentence(why)}")


def _sentence(error: str) -> str:
    """Returns what llguidance says, in one line."""
    lines = [line.strip() for line in error.splitlines()]
    said = next((line for line in lines if line and not line.startswith("<")), "unknown reason")
    # What is wrong with a pattern comes behind a drawing of its place.
    why = next((line.removeprefix(_WHY) for line in lines if line.startswith(_WHY)), "")
    said = f"{_PATTERN} {why}" if _PATTERN in said and why else said
    return " ".join(said.split())[:200]
