"""Decides which part of a conversation is dropped when its context is full, and requests a summary of it; needs no
model."""

from __future__ import annotations

from collections.abc import Callable

from ktcli.errors import UsageError

DROP, STOP = "drop", "stop"  # what happens when a question does not fit: the setting `when-full`
# When turns have to go, half of the context is made free: each time it all is read anew.
DROP_SHARE = 2
SUMMARY_SHARE = 8  # of the context: the longest summary
KEPT_TURNS = 2  # the last question and its answer, which a summary does not replace
SUM_UP = (
    "Sum up our conversation so far in a short text, for yourself to go on with: what was asked, what was found and"
    " decided, and names, numbers and code that matter. Write the summary alone."
)


def older_turns(turns: int, omitted: int) -> int:
    """Returns the number of oldest turns that a summary replaces, `omitted` ones included, in a conversation of
    `turns` turns whose prompt already leaves out `omitted`.

    Raises:
        UsageError: there are no more than are left out already.
    """
    older = turns - turns % 2 - KEPT_TURNS
    if older <= omitted:
        raise UsageError(
            "there is nothing to summarize yet: the last question and its answer are left as they are",
            hint="/clear starts over",
        )
    return older


def fewest_omitted(turns: int, omitted: int, fits: Callable[[int], bool]) -> int:
    """Returns the smallest number of oldest turns to leave out of a conversation, a question and its answer at a time,
    so that the rest fits; if nothing fits, all but the last question.

    Args:
        turns: the number of turns of the conversation.
        omitted: the turns that are left out already, which are too few.
        fits: returns whether the rest fits without so many turns; if it does, it also does without more.
    """
    last = omitted + 2 * max(0, (turns - omitted - 1) // 2)
    most, step = last, 2  # `most` is enough; `least` is too few
    least = omitted
    if last == omitted or not fits(last):
        return last
    while (tried := most - step) > least and fits(tried):
        most, step = tried, 2 * step
    least = max(least, tried)
    while most - least > 2:
        middle = least + (most - least) // 4 * 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


def exchanges(turns: int) -> str:
    """Returns words for a number of turns: "the oldest 3 questions and their answers"."""
    count = turns // 2
    if count == 1:
        return "the oldest question and its answer"
    return f"the oldest {count} questions and their answers"
