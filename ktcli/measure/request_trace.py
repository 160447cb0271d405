"""Reads a request trace: a line of JSON per request, in the form of Mooncake's published traces.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

A line has the milliseconds of its arrival, the tokens of prompt and answer, and a number for each block of the prompt's
tokens, the last of which may be a part of one. Two blocks are the same where their numbers are and all blocks before
them are, too: what a cache holds of a block depends on every token before it. The blocks of a trace are therefore a
tree, of which stretches without a branch are kept as one *segment*, however many blocks they have.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError, counted
from ktcli.records import dataclass

BLOCK_TOKENS = 512  # of Mooncake's traces
MOST_BLOCK_TOKENS = 1 << 16
MOST_LINE_BYTES = 16 << 20  # a prompt of a million tokens in blocks of 16 has a tenth of it
MOST_BLOCKS = 10_000_000  # different ones, which take 200 bytes each while they are read
_MOST_TOKENS = 1 << 30  # of a prompt or an answer
_MOST_MS = 1 << 50
_MOST_ID = 1 << 64

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Paths = tuple[tuple[int, ...], ...]


class TracedRequest(NamedTuple):
    """A line of a trace.

    Attributes:
        timestamp: when the request came, milliseconds.
        input_length, output_length: the tokens of the prompt and of the answer.
        hash_ids: the numbers of the prompt's blocks, the last of which may be a part of one.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @classmethod
    def read(cls, line: bytes) -> TracedRequest:
        """Returns the request that a line of a trace, a JSON object, describes.

        Raises:
            ValueError: the line is not a request; the message says what is wrong with it.
        """
        entry = smallfiles.json_object(line)
        lengths = _length(entry, "input_length", 1), _length(entry, "output_length", 0)
        return cls(_time(entry), *lengths, _ids(entry))


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """The requests of a trace in the order of their arrival.

    Attributes:
        block: the tokens of a block.
        arrivals_s: the seconds of each arrival after the first, [R].
        inputs, outputs: the tokens of each prompt and answer, [R].
        paths: the segments of each prompt, first to last.
        ends: how many blocks each prompt has up to the end of each of its segments.
        segments: the number of different segments, whose numbers are 0..segments-1.
        blocks: the blocks of all prompts.
        distinct_blocks: the different ones of them.
        common_share: the mean share of a prompt that at least half of all prompts begin with, 0..1.
    """

    block: int
    arrivals_s: Floats
    inputs: Ints
    outputs: Ints
    paths: Paths
    ends: Paths
    segments: int
    blocks: int
    distinct_blocks: int
    common_share: float

    @property
    def requests(self) -> int:
        """The number of requests in the trace."""
        return len(self.paths)

    @property
    def tokens(self) -> int:
        """The number of tokens of all prompts of the trace."""
        return int(self.inputs.sum())

    @property
    def span_s(self) -> float:
        """The seconds between the first and the last arrival of a request."""
        return float(self.arrivals_s[-1])


def read_trace(
    path: Path, block: int | None = None, progress: Callable[[int], None] = lambda read: None
) -> RequestTrace:
    """Returns the requests of a trace file, with the blocks (runs of tokens) that their prompts have in common.

    Args:
        block: the number of tokens in a block; None: the power of two that fits the lengths of all lines, BLOCK_TOKENS
            if several do.
        progress: called with the number of bytes read so far.
    Raises:
        NotFound: the file cannot be read.
        UsageError: the file has no requests, or a line is not one; the message has the line's number.
    """
    reading = _Reading(path, block)
    try:
        with path.open("rb") as file:
            for number, line in _lines(path, file):
                reading.add(number, line)
                if not number & 255:
                    progress(file.tell())
    except OSError as error:
        raise NotFound(
            f"cannot read the trace {str(path)[:300]}: {error.strerror}",
            hint="kt serve --record-trace FILE records one",
        ) from error
    return reading.trace()


def _lines(path: Path, file: Any) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, each with its number."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise _bad(path, number, f"is longer than {MOST_LINE_BYTES >> 20} MiB")
        if not line.isspace():
            yield number, line


def _bad(path: Path, number: int, said: str) -> UsageError:
    return UsageError(
        f"{str(path)[:300]}, line {number:,} {said}",
        hint='each line is a request, as {"timestamp": 9, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}',
    )


class _Reading:
    """What is known of a trace after some of its lines."""

    def __init__(self, path: Path, block: int | None) -> None:
        self._path, self._asked = path, block
        self._fitting = (
            [block] if block else [1 << n for n in range(MOST_BLOCK_TOKENS.bit_length())]
        )
        self._times_ms: list[float] = []
        self._lengths: tuple[list[int], list[int]] = ([], [])
        # The tree of blocks: the number of a node by that of the one before it (-1: none) and the id of its block.
        self._nodes: dict[tuple[int, int], int] = {}
        self._before = array("i")
        # The nodes of all prompts, and where each one's begin.
        self._flat, self._offsets = array("i"), [0]

    def add(self, number: int, line: bytes) -> None:
        """Adds a line. Raises: UsageError: it is not a request, or does not fit those before it."""
        try:
            time_ms, n_tokens, answer, ids = TracedRequest.read(line)
            if self._times_ms and time_ms < self._times_ms[-1]:
                raise ValueError(
                    f"has the timestamp {time_ms:.10g}, which is before {self._times_ms[-1]:.10g} of the line before"
                )
            self._fit(len(ids), n_tokens)
        except ValueError as error:
            raise _bad(self._path, number, str(error)) from None
        self._times_ms.append(time_ms)
        self._lengths[0].append(n_tokens)
        self._lengths[1].append(answer)
        self._walk(ids)
        if len(self._nodes) > MOST_BLOCKS:
            said = f"is the first beyond {MOST_BLOCKS:,} different blocks, the most that kt replays"
            raise UsageError(
                f"{str(self._path)[:300]}, line {number:,} {said}",
                hint=f"replay a part of it: head -n {number - 1} FILE > PART",
            )

    def _fit(self, n_ids: int, n_tokens: int) -> None:
        """Leaves the sizes of a block with which a prompt has so many. Raises: ValueError: there is none left."""
        fitting = [each for each in self._fitting if -(-n_tokens // each) == n_ids]
        if not fitting:
            said = f"has {counted(n_ids, 'hash_id')} for an input_length of {n_tokens:,}"
            if self._asked:
                blocks = counted(-(-n_tokens // self._asked), "block")
                raise ValueError(f"{said}, which has {blocks} of {self._asked:,} tokens")
            known = f"1, 2, 4 … {MOST_BLOCK_TOKENS:,}"
            if self._times_ms:
                known = f"{' or '.join(map(str, self._fitting[-2:]))}, as the lines before have"
            raise ValueError(
                f"{said}, which fits no blocks of {known}; --block N names another size"
            )
        self._fitting = fitting

    def _walk(self, ids: list[int]) -> None:
        """Adds the path of a prompt to the tree."""
        nodes, before, flat = self._nodes, self._before, self._flat
        at = -1
        for id in ids:
            found = nodes.get((at, id))
            if found is None:
                found = nodes[at, id] = len(before)
                before.append(at)
            at = found
            flat.append(at)
        self._offsets.append(len(flat))

    def trace(self) -> RequestTrace:
        """Returns the trace of all lines. Raises: UsageError: there are none."""
        if not self._times_ms:
            raise UsageError(
                f"{str(self._path)[:300]} has no requests",
                hint="kt serve --record-trace FILE records some",
            )
        block = BLOCK_TOKENS if BLOCK_TOKENS in self._fitting else self._fitting[-1]
        times = np.array(self._times_ms, np.float64)
        inputs, outputs = (np.array(each, np.int64) for each in self._lengths)
        paths, ends, segments = self._segments()
        common = np.minimum(block * _common_blocks(paths, ends, segments), inputs) / inputs
        counts = segments, len(self._flat), len(self._before)
        return RequestTrace(
            block,
            (times - times[0]) / 1e3,
            inputs,
            outputs,
            paths,
            ends,
            *counts,
            float(common.mean()),
        )

    def _segments(self) -> tuple[Paths, Paths, int]:
        """Joins nodes without a branch; returns the paths and ends of all prompts, and the number of segments."""
        flat = np.frombuffer(self._flat, np.int32) if self._flat else np.zeros(0, np.int32)
        before = np.frombuffer(self._before, np.int32) if self._before else np.zeros(0, np.int32)
        offsets = np.array(self._offsets)
        is_end = np.bincount(before[before >= 0], minlength=before.size) != 1
        is_end[flat[offsets[1:][np.diff(offsets) > 0] - 1]] = True  # of a prompt
        number = np.cumsum(is_end) - 1
        places = np.flatnonzero(is_end[flat])
        which = number[flat[places]].tolist()
        borders = np.searchsorted(places, offsets)
        lengths = (places + 1 - np.repeat(offsets[:-1], np.diff(borders))).tolist()
        pairs = list(zip(borders.tolist(), borders[1:].tolist(), strict=False))
        paths = tuple(tuple(which[a:b]) for a, b in pairs)
        return paths, tuple(tuple(lengths[a:b]) for a, b in pairs), int(is_end.sum())


def _common_blocks(paths: Paths, ends: Paths, segments: int) -> Ints:
    """Returns how many blocks at the beginning of each prompt at least half of all prompts begin with, too, [R]."""
    passing = np.bincount([each for path in paths for each in path], minlength=segments)
    common = set(np.flatnonzero(2 * passing >= max(2, len(paths))).tolist())
    return np.array(
        [
            max((end for segment, end in zip(*each, strict=True) if segment in common), default=0)
            for each in zip(paths, ends, strict=True)
        ]
    )


def _time(entry: dict[str, Any]) -> float:
    """Returns the milliseconds of a line. Raises: ValueError: it has none."""
    value = _required(entry, "timestamp")
    if type(value) not in (int, float) or not (isfinite(value) and 0 <= value <= _MOST_MS):
        raise ValueError(
            f"has the timestamp {_shown(value)}, which is not a number of milliseconds"
        )
    return float(value)


def _length(entry: dict[str, Any], name: str, least: int) -> int:
    """Returns a number of tokens of a line. Raises: ValueError: it has none."""
    value = _required(entry, name)
    if type(value) is not int or not least <= value <= _MOST_TOKENS:
        raise ValueError(
            f"has the {name} {_shown(value)}, which is not a number of tokens from {least}"
        )
    return value


def _ids(entry: dict[str, Any]) -> list[int]:
    """Returns the numbers of a line's blocks. Raises: ValueError: it has none."""
    value = _required(entry, "hash_ids")
    if type(value) is not list:
        raise ValueError(f"has the hash_ids {_shown(value)}, which are not a list")
    for each in value:
        if type(each) is not int or not 0 <= each < _MOST_ID:
            raise ValueError(
                f"has the hash_id {_shown(each)}, which is not a whole number below 2^64"
            )
    return value


def _required(entry: dict[str, Any], name: str) -> Any:
    if name not in entry:
        raise ValueError(f"has no {name}")
    return entry[name]


def _shown(value: object) -> str:
    """Returns a value of a line for a sentence, short whatever it is."""
    if type(value) is int and abs(value) >= _MOST_ID << 64:
        return "of many digits"  # which Python may refuse to write
    return f"{value:.10g}" if type(value) is float else repr(value)[:40]
