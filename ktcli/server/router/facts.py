"""The facts of servers that a router is told of, and the rules by which they belong together."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.errors import UsageError
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's report on itself, as a router needs it.

    Attributes:
        url: its address: "http://10.0.0.2:11435".
        model: the one that it serves.
        context: of that model, in tokens; None: it does not say.
        streams: the requests that it answers at the same time; None: it does not say.
        token_s: the mean time of a token of one stream, or as planned; None: it does not say.
        common: the share of prompts, 0 to 1, with which conversations begin alike: of those that begin a conversation,
            what was in the cache; None: it has not answered enough of them, or does not say.
        cached: the share of all prompts that was in the cache; None: the same.
        program: what runs there: "kt 0.1.0"; empty: it does not say.
    """

    url: str
    model: str
    context: int | None = None
    streams: int | None = None
    token_s: float | None = None
    common: float | None = None
    cached: float | None = None
    program: str = ""


def require_agreement(servers: Sequence[ServerFacts]) -> None:
    """Raises an error if servers cannot replace one another.

    Raises:
        UsageError: two have different models or contexts; the sentence names them.
    """
    first = servers[0]
    for other in servers[1:]:
        if other.model != first.model:
            raise UsageError(
                f"{first.url} serves {first.model}, and {other.url} serves {other.model}:"
                " a router needs servers of one model",
                hint="start both with one model, or give it one name with --model-alias and pass it with --model",
            )
    told = [each for each in servers if each.context is not None]
    for other in told[1:]:
        if other.context != told[0].context:
            whose = f"{other.url} of" if other.url != told[0].url else "by now of"
            raise UsageError(
                f"{told[0].url} has a context of {told[0].context:,} tokens, and {whose} {other.context:,}:"
                " a conversation could fit one and not the other",
                hint=f"start both with the same one: kt serve {first.model} --context"
                f" {min(told[0].context or 0, other.context or 0)}",
            )
