"""`kt bench serve` against a pace that is known: by a clock that only the server's pieces move, so that no figure is
the machine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ktcli.commands.view.serving import serving_document
from ktcli.measure import endpoint, traffic
from ktcli.measure.latency import Served

FIRST_S, NEXT_S, END_S = 0.5, 0.0625, 0.25  # exact in binary
CONNECTED_S = 0.125


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Exchange:
    """What a paced server answers, on the clock; a piece has `together` tokens."""

    status = 200
    headers = SimpleNamespace(
        get_content_type=lambda: "text/event-stream", get=lambda name, default: default
    )
    clock: Clock
    together: int
    counts: bool

    def __init__(self, _endpoint: Any, _method: str, _path: str, body: dict[str, Any]) -> None:
        self._tokens = int(body["max_tokens"])
        self._words = len(body["messages"][0]["content"].split())
        self._lines = self._events()

    def __enter__(self) -> Exchange:
        self.clock.now_s += CONNECTED_S
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()  # type: ignore[attr-defined]

    def readline(self, _most: int) -> bytes:
        return next(self._lines, b"")

    def _events(self) -> Iterator[bytes]:
        yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for at in range(0, self._tokens, self.together):
            self.clock.now_s += NEXT_S if at else FIRST_S
            yield _event({"choices": [{"delta": {"content": "a"}}]})
            yield b": keep-alive\n"
        self.clock.now_s += END_S  # what follows the last piece is no part of its latency
        if self.counts:
            usage = {"prompt_tokens": self._words, "completion_tokens": self._tokens}
            yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n"


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n"


@pytest.mark.parametrize("together, counts", [(1, True), (1, False), (4, True)])
def test_a_known_pace_is_found_to_the_last_digit(
    together: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per request: connecting, the first piece, the others, the end. TPOT is of tokens, ITL of pieces."""
    clock = Clock()
    for module in (endpoint, traffic):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(endpoint, "_Exchange", Exchange)
    for name, value in (("clock", clock), ("together", together), ("counts", counts)):
        monkeypatch.setattr(Exchange, name, value, raising=False)
    requests, tokens = 5, 33
    wanted = traffic.Traffic(requests, 20, tokens, at_once=1)
    where = endpoint.Endpoint("http://server", model="paced")
    driven = traffic.drive(where, wanted)
    found = serving_document(where, wanted, driven, Served.of(driven), None)
    gaps = (tokens - 1) // together
    ttft, spoken = CONNECTED_S + FIRST_S, gaps * NEXT_S
    seconds = requests * (ttft + spoken + END_S)
    for statistic in ("mean", "median", "p99", "max"):
        for name, value in (
            ("ttft", ttft),
            ("itl", NEXT_S),
            ("tpot", spoken / (tokens - 1)),
            ("e2e_latency", ttft + spoken),
        ):
            assert found[f"{statistic}_{name}_ms"] == pytest.approx(1e3 * value, rel=1e-12)
    assert found["completed"] == requests and found["duration"] == seconds
    assert found["total_output_tokens"] == requests * tokens
    assert found["total_input_tokens"] == (requests * 20 if counts else 0)
    assert found["output_throughput"] == requests * tokens / seconds
    assert found["request_throughput"] == requests / seconds
    assert found["concurrency"] == pytest.approx(requests * (ttft + spoken) / seconds)
