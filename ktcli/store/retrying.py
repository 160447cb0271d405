"""Repeats requests to a hub or a server that is busy or drops the connection: a few times, after the delay it asks
for, and never silently.

Only what a hub is asked of repositories, and a server before its answer begins; `transfer` tries files again by itself,
and continues them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ktcli.errors import NetworkError

Answer = TypeVar("Answer")
Tell = Callable[[str], object]

RETRIES = 3
LONGEST_S = 60.0  # who asks for more is told of to the user instead
FIRST_S = 1.0  # where the hub does not say how long; doubled each time
STATUSES = frozenset((429, 502, 503, 504))


def silent(sentence: str) -> None:
    """Does nothing: the listener for callers who need not hear of retries."""


def with_retries(
    ask: Callable[[], Answer],
    tell: Tell = silent,
    wait: Callable[[float], object] | None = None,
) -> Answer:
    """Returns the result of `ask`, which is called again, up to three times, after network errors that are temporary.

    Args:
        tell: is given a sentence before each wait.
        wait: called with the seconds to wait; returns whether to give up. None: `time.sleep`.
    Raises:
        NetworkError: the last attempt failed, or the error is not one that waiting helps against.
    """
    for attempt in range(RETRIES):
        try:
            return ask()
        except NetworkError as error:
            if error.again_s is None or error.again_s > LONGEST_S:
                raise
            wait_s = error.again_s or FIRST_S * 2**attempt
            tell(f"{error}; retrying in {wait_s:.0f} s ({attempt + 1} of {RETRIES}) …")
            if (wait or time.sleep)(wait_s):
                raise
    return ask()


def retry_after(error: BaseException) -> float | None:
    """Returns how many seconds to wait, from the header `Retry-After` of the HTTP response that an exception carries;
    None: it has none, or it is invalid.
    """
    answer = getattr(error, "response", None)
    return seconds_asked(answer.headers.get("Retry-After", "") if answer is not None else "")


def seconds_asked(said: str) -> float | None:
    """Returns how many seconds to wait, from the value of an HTTP header `Retry-After`: a number or a date; None: it is
    invalid.
    """
    if said.isascii() and said.isdigit():
        return float(said[:9])
    from email.utils import parsedate_to_datetime  # rarely needed

    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
