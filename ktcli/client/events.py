"""Reads the event stream of an answer: each line with data is a JSON object, and `[DONE]` ends it.

A stream is foreign input, without end if its sender likes: lines, and all of it, are bounded. One that ends without
`[DONE]` was cut off; one with an error in it failed, whatever follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ktcli.errors import ServerFailed, gib
from ktcli.smallfiles import json_object

LINE_BYTES = 1 << 20
STREAM_BYTES = 256 << 20  # millions of tokens, whatever is around them
_SHOWN = 100  # bytes of a line that is not an event
Document = dict[str, Any]


def documents(chunks: Iterable[bytes], who: str) -> Iterator[Document]:
    """Yields the JSON objects of an event stream, up to `[DONE]`; one that reports an error has the key `error`.

    Args:
        who: the server, for errors.
    Raises:
        ServerFailed: the stream ends before `[DONE]`, is too long, or has something else in it.
    """
    failed = False  # whether the next data are those of an event that is called an error
    for line in _lines(chunks, who):
        field, _, value = line.partition(b":")
        value = value.strip()
        if field == b"event":
            failed = value == b"error"
        if field != b"data":
            continue
        if value == b"[DONE]":
            return
        try:
            found = json_object(value)
        except ValueError as error:
            said = f"{who} sent a line that is not an event: {line[:_SHOWN]!r} {error}"
            raise ServerFailed(said) from error
        # vLLM once sent errors as objects of this kind, others name the event.
        if found.get("object") == "error" or (failed and not found.get("error")):
            found = {"error": found}
        failed = False
        yield found
    raise ServerFailed(
        f"the stream of {who} ended before the answer did", hint=CUT_HINT, again_s=0.0
    )


CUT_HINT = "ask again; a saved chat keeps what came of the answer"


def _lines(chunks: Iterable[bytes], who: str) -> Iterator[bytes]:
    """Yields the lines of a stream as soon as they are whole; the beginning of one at the end is none."""
    rest, total = b"", 0
    for chunk in chunks:
        total += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        longest = max(map(len, (*lines, rest)))
        if longest > LINE_BYTES or total > STREAM_BYTES:
            what = f"a line of more than {gib(LINE_BYTES)}" if longest > LINE_BYTES else gib(total)
            raise ServerFailed(f"{who} sent {what} in one answer, which is no answer to read")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest.rstrip().endswith(b"[DONE]"):  # some servers forget the end of the last line
        yield rest
