"""A request whose answer is streamed, and when its tokens came: for store*.py."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any


@dataclass
class Streamed:
    """What came of a request.

    Attributes:
        sent_s, ended_s: when it was sent and had ended, `time.perf_counter`.
        moments: when each token came.
        tiers: the tokens of the prompt that were found, by the tier that had them.
        cpu_s: the processor time of the server from the first token to the end.
    """

    sent_s: float
    ended_s: float = 0.0
    moments: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def first_s(self) -> float:
        """The seconds until the first token."""
        return self.moments[0] - self.sent_s

    @property
    def token_s(self) -> float:
        """The seconds per token after the first."""
        return (self.moments[-1] - self.moments[0]) / (len(self.moments) - 1)


def cpu_s(pid: int) -> float:
    """Returns the processor time of a process so far, of all its threads."""
    return time.clock_gettime(
        ~pid << 3 | 2
    )  # the kernel's number for CLOCK_PROCESS_CPUTIME_ID of it


def stream(
    port: int, ids: list[int], tokens: int, model: str, pid: int = 0, **more: Any
) -> Streamed:
    """Returns what came of a greedy answer of so many tokens to a prompt of ids.

    Args:
        pid: of the server, whose processor time is wanted; 0: it is not.
    """
    body = {"model": model, "prompt": ids, "max_tokens": tokens, "stream": True, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0}  # each token in an event of its own
    body |= {"stream_options": {"include_usage": True}, **more}
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    found = Streamed(time.perf_counter())
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise SystemExit(f"a server answers {reply.status}: {reply.read()[:200]!r}")
        for line in reply:
            if b'"logprobs":{' in line:
                if pid and not found.moments:
                    found.cpu_s = -cpu_s(pid)
                found.moments.append(time.perf_counter())
            elif b'"usage":{' in line:
                _count(found, json.loads(line.removeprefix(b"data: "))["usage"])
        found.ended_s = time.perf_counter()
        found.cpu_s += cpu_s(pid) if pid else 0.0
    finally:
        connection.close()
    return found


def _count(found: Streamed, usage: dict[str, Any]) -> None:
    details = usage["prompt_tokens_details"]
    found.prompt, found.cached = usage["prompt_tokens"], details["cached_tokens"]
    found.tiers = details.get("cached_tokens_details", {})
