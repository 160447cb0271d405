"""Of an answer that may have one call only, the others are left out."""

from __future__ import annotations

from ktcli.answers.events import Added, AnswerPiece, CallArguments, CallBegins, CallEnds
from ktcli.answers.reader import AnswerReader


class _Alone(CallEnds):
    """An event that nobody compares with others: a list of calls would take the square of its length."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = CallEnds.__hash__


def test_further_calls_are_left_out_one_by_one() -> None:
    reader = object.__new__(AnswerReader)
    reader._one_call, reader.called = True, False
    first = AnswerPiece("I look."), CallBegins(0, "f"), CallArguments(0, "{}"), _Alone(0)
    further = tuple(_Alone(number) for number in range(1, 50))
    added = reader._allowed(Added("text", first + further))
    assert added.text == "text" and len(added.events) == len(first) and reader.called
    assert [type(each) for each in added.events] == [type(each) for each in first]
