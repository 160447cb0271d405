"""Derives how a router is started from the facts of its servers: pure functions, from facts to a command line.

The threshold is the share of a prompt that must match what a server has seen before a request goes there for it. It has
to be above what all conversations begin with, or all of them go to one server; it should not be far above, or a
conversation's own second question goes elsewhere. Measured with the servers of kt-mini: benchmarks/route.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from math import ceil

from ktcli.assembly.child import option_words
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
    """Checks that servers can replace one another.

    Raises:
        UsageError: two have different models or contexts; the error names them.
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


# Until it is learned what conversations begin with. With 0.6, eight clients without anything in common found 95 % of
# what one cache has, with 0.1 98 %; where more is in common, the spill keeps the servers even.
UNKNOWN_THRESHOLD = 0.1
_MARGIN = 0.1  # of the threshold above the common share
_MOST_THRESHOLD = 0.8
_STREAMS = 4  # of a server that does not say: the default of kt serve
_SPILL_PART = 4  # a quarter of the streams
# Of the mean, above which a server spills, too. With 1.0 conversations move by chance (eight clients found 83 to 89 %
# of what one cache has, with 1.5 92 to 96 %); with 2.0 all stay at one of two servers.
_SPILL_RATIO = 1.5
_LEAST_S, _MOST_S = 1800, 86_400  # of a request; the router's own default, and a day
HEALTH_S = 2
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """The numbers that a router is started with.

    Attributes:
        threshold: the share of a prompt, 0 to 1, that must match a server's earlier prompts.
        why: where the threshold comes from, a few words.
        spill: the requests by which a server may have more than the mean before others get its conversations.
        timeout_s: the seconds after which a request is given up.
    """

    threshold: float
    why: str
    spill: int
    timeout_s: int


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """The address of a router; its metrics are on this machine's loopback.

    Attributes:
        drain_s: the seconds that answers may take to finish when it is stopped.
    """

    host: str
    port: int
    metrics_port: int
    drain_s: int = 10

    @property
    def url(self) -> str:
        """The URL at which clients reach the router, such as http://127.0.0.1:11435."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RouterKeys:
    """The keys of a router.

    Attributes:
        users: what users show, by name; (): nobody has to show any.
        control: what must be shown to add and remove servers.
    """

    users: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    control: str = field(default="", repr=False)

    @property
    def first(self) -> str:
        """The API key with which kt and the router themselves send requests to the servers; empty: there is none."""
        return self.users[0][1] if self.users else ""

    def hidden(self) -> RouterKeys:
        """Returns the same names of users with all keys replaced by ***, to be printed."""
        return RouterKeys(tuple((name, HIDDEN) for name, _ in self.users), HIDDEN)


def plan_for(servers: Sequence[ServerFacts]) -> RoutingPlan:
    """Returns the settings for a router of these servers: by what match with earlier prompts it chooses a server, how
    uneven their load may be, and when it gives up a request. `servers` is not empty, and they agree (see
    `require_agreement`).
    """
    threshold, why = _threshold(servers)
    streams = min(each.streams or _STREAMS for each in servers)
    return RoutingPlan(threshold, why, max(1, streams // _SPILL_PART), _timeout_s(servers))


def _threshold(servers: Sequence[ServerFacts]) -> tuple[float, str]:
    common = [each.common for each in servers if each.common is not None]
    if not common:
        return UNKNOWN_THRESHOLD, "not learned yet"
    most = max(common)
    said = f"conversations begin alike in {most:.0%} of their first prompt"
    return round(min(_MOST_THRESHOLD, most + _MARGIN), 2), said


def _timeout_s(servers: Sequence[ServerFacts]) -> int:
    """The time in which the slowest server says as many tokens as its context has, beside all its other streams."""
    slowest = max(
        (each.token_s or 0.0) * (each.context or 0) * (each.streams or _STREAMS) for each in servers
    )
    return min(_MOST_S, max(_LEAST_S, ceil(slowest)))


def arguments(
    urls: Sequence[str], plan: RoutingPlan, place: RouterPlace, keys: RouterKeys
) -> list[str]:
    """Returns the arguments of the command line that starts smg, the router program.

    Args:
        urls: the addresses of the servers.
    """
    words: list[str] = ["launch", "--worker-urls", *urls]
    options: dict[str, object] = {
        "host": place.host,
        "port": place.port,
        "prometheus-host": "127.0.0.1",
        "prometheus-port": place.metrics_port,
        "policy": "cache_aware",
        "cache-threshold": plan.threshold,
        "balance-abs-threshold": plan.spill,
        "balance-rel-threshold": _SPILL_RATIO,
        "request-timeout-secs": plan.timeout_s,
        "shutdown-grace-period-secs": max(1, place.drain_s),
        "health-check-interval-secs": HEALTH_S,
        "health-failure-threshold": 2,
        "health-success-threshold": 1,
        "cb-failure-threshold": 2,
        "cb-success-threshold": 1,
        "cb-timeout-duration-secs": 5,
        "retry-max-retries": 3,
        "log-level": "warn",
    }
    for name, value in options.items():
        words += option_words(f"--{name}", str(value))
    words += ["--log-json", "--disable-tokenizer-autoload"]
    for at, (name, key) in enumerate(keys.users):
        given = ("--tenant-api-key", f"{name}:{key}") if at else ("--api-key", key)
        words += option_words(*given)
    return [*words, "--control-plane-api-keys", f"kt:kt:admin:{keys.control}"]
