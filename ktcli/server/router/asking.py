"""Asks servers what they are: kt serve, vLLM, SGLang and llama-server, through the paths that each of them has.

A server may answer anything: what it says is bounded in size and time, and what makes no sense counts as not said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from ktcli.client.address import ServerAddress
from ktcli.client.http import HttpClient, NoResponse
from ktcli.client.serverclient import ListedModel, listed_models
from ktcli.errors import KtError, UsageError, hinted
from ktcli.server.router.counters import Counters, cached_share, counters_in, mean, ratio
from ktcli.server.router.plan import ServerFacts
from ktcli.smallfiles import json_object
from ktcli.threadpool import Threads

T = TypeVar("T")

ANSWER_S = 10.0  # in which a server has answered one question
_MOST_BYTES = 4 << 20
_SHOWN = 200
_CHECK = "check that it answers: curl ADDRESS/v1/models"
# That a server has looked up before shares of them are taken for its traffic's.
_LEAST_TOKENS = 2000
_AT_ONCE = 16
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class HttpReply(NamedTuple):
    """The response of a server.

    Attributes:
        body: whole, or empty if it is too long.
    """

    status: int
    body: bytes


class _GenerationSettings(msgspec.Struct):
    n_ctx: _Count | None = None


class _Props(msgspec.Struct):
    """What `/props` of kt serve and llama-server says."""

    model_alias: _Text = ""
    total_slots: _Count | None = None
    build_info: _Text = ""
    default_generation_settings: _GenerationSettings = msgspec.field(
        default_factory=_GenerationSettings
    )


class _Rank(msgspec.Struct):
    """What a rank of SGLang says of itself."""

    effective_max_running_requests_per_dp: _Count | None = None


class _Info(msgspec.Struct):
    """What `/server_info` of kt serve and SGLang says.

    Attributes:
        max_running_requests: of SGLang only where somebody chose it.
    """

    max_running_requests: _Count | None = None
    decode_tok_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    internal_states: list[_Rank] = msgspec.field(default_factory=list)

    @property
    def streams(self) -> int | None:
        """The requests that are answered at the same time; None: it does not say."""
        of_ranks = [
            each.effective_max_running_requests_per_dp or 0 for each in self.internal_states
        ]
        return sum(of_ranks) or self.max_running_requests


def facts_of_those_there(
    addresses: Sequence[ServerAddress], key: str, model: str = ""
) -> tuple[tuple[ServerFacts, ...], tuple[tuple[ServerAddress, KtError], ...]]:
    """Asks all servers at the same time; returns the facts of those that respond, and for each of the others its
    address and the error that says why it does not.

    Args:
        key: the API key to send; empty: none.
        model: the model that is wanted; empty: the server's only or own one.
    Raises:
        KtError: no server responds, or one that does cannot be used; the first such error.
    """

    def asked(address: ServerAddress) -> ServerFacts | NoResponse:
        try:
            return facts_of(address, key, model)
        except NoResponse as error:
            return error

    with Threads(min(_AT_ONCE, len(addresses)), "kt-asking") as team:
        found = list(team.map(asked, addresses))
    servers = tuple(each for each in found if isinstance(each, ServerFacts))
    absent = tuple(
        (address, each)
        for address, each in zip(addresses, found, strict=True)
        if isinstance(each, NoResponse)
    )
    if not servers:
        raise absent[0][1]
    return servers, absent


def facts_of(address: ServerAddress, key: str, model: str = "") -> ServerFacts:
    """Returns what a server says of itself: its model, context, parallel requests, speed and cache hits.

    Args:
        key: the API key to send; empty: none.
        model: the model that is wanted; empty: the server's only or own one.
    Raises:
        KtError: the server does not respond, refuses the key, does not serve `model`, or does not say what it serves.
    """
    rows = _models_of(address, key)
    props = _decoded(_asked_or_none(address, "/props", key), _Props) or _Props()
    own = props.model_alias if props.model_alias in {each.name for each in rows} else ""
    row = _row(address, rows, model or own)
    info = _info(address, key)
    metrics = _asked_or_none(address, "/metrics", key)
    found = ServerFacts(
        address.url,
        row.name,
        row.context or props.default_generation_settings.n_ctx,
        props.total_slots or info.streams,
        1 / info.decode_tok_s if info.decode_tok_s else None,
        program=props.build_info,
    )
    is_counted = metrics is not None and metrics.status == 200
    return with_counters(found, counters_in(metrics.body)) if metrics and is_counted else found


def context_of(address: ServerAddress, key: str, model: str) -> int | None:
    """Returns the context, in tokens, that a server lists for a model; None: it lists none. Raises: as `facts_of`."""
    return _row(address, _models_of(address, key), model).context


def counters_of(address: ServerAddress, key: str = "", answer_s: float = 0.0) -> Counters:
    """Returns the Prometheus counters of a server, empty if it does not respond within `answer_s` seconds, see
    `ask`."""
    reply = _asked_or_none(address, "/metrics", key, answer_s)
    return Counters({}) if reply is None else counters_in(reply.body)


def with_counters(facts: ServerFacts, counters: Counters) -> ServerFacts:
    """Returns the facts of a server, completed by its counters: the shares of prompts that were in the cache and, if it
    is missing, the mean time of a token."""
    measured_s = mean(counters, "inter_token_latency_seconds", "time_per_output_token_seconds")
    return replace(
        facts,
        token_s=facts.token_s or measured_s,
        common=ratio(
            counters, "first_prompt_cache_hits", "first_prompt_cache_queries", _LEAST_TOKENS
        ),
        cached=cached_share(counters, _LEAST_TOKENS),
    )


def _models_of(address: ServerAddress, key: str) -> list[ListedModel]:
    """The models that a server lists, one at least. Raises: as `facts_of`."""
    with hinted(_CHECK):
        reply = ask(address, "/v1/models", key)
    if reply.status in (401, 403):
        raise UsageError(
            f"{address.url} {'refuses the' if key else 'needs an'} API key",
            hint="servers and router take the same key: put it into a file, passed with --api-key-file",
        )
    # It is loading or busy, or a proxy does not reach it.
    if reply.status >= 500 or reply.status == 429:
        raise NoResponse(f"{address.url} does not answer yet: HTTP {reply.status}", hint=_CHECK)
    with contextlib.suppress(ValueError):
        if reply.status == 200 and (found := listed_models(json_object(reply.body))):
            return found
    raise KtError(
        f"{address.url} does not say which models it serves: {_said(reply)}",
        hint="a router takes servers that speak OpenAI's API, such as kt serve",
    )


def _info(address: ServerAddress, key: str) -> _Info:
    """What a server says of itself; older releases of SGLang only under the second name."""
    for path in ("/server_info", "/get_server_info"):
        if (found := _decoded(_asked_or_none(address, path, key), _Info)) is not None:
            return found
    return _Info()


def _row(address: ServerAddress, rows: Sequence[ListedModel], wanted: str) -> ListedModel:
    """The row of the model that is served.

    Raises:
        UsageError: there are several, and nobody says which is meant.
    """
    for row in rows:
        if row.name == wanted:
            return row
    names = ", ".join(each.name for each in rows[:5])
    if wanted:
        raise UsageError(f"{address.url} does not serve {wanted[:_SHOWN]}; it has {names}")
    if len(rows) > 1:
        raise UsageError(
            f"{address.url} serves several models: {names}", hint="name one with --model"
        )
    return rows[0]


def _asked_or_none(
    address: ServerAddress, path: str, key: str, answer_s: float = 0.0
) -> HttpReply | None:
    try:
        return ask(address, path, key, answer_s=answer_s)
    except KtError:
        return None


def ask(
    address: ServerAddress,
    path: str,
    key: str = "",
    *,
    method: str = "GET",
    body: Any = None,
    answer_s: float = 0.0,
) -> HttpReply:
    """Returns the response of a server to an HTTP request: its status, and its body, empty if that is too long.

    Args:
        key: the API key to send; empty: none.
        body: what is sent as JSON; None: nothing is.
        answer_s: the seconds that the response may take; 0: `ANSWER_S`, 10.
    Raises:
        ServerFailed: the server does not respond in time, or its certificate cannot be verified.
    """
    most_s, client = answer_s or ANSWER_S, HttpClient(address, key)
    with client.asked(method, path, body, connect_s=most_s, silence_s=most_s) as reply:
        return HttpReply(reply.status_code, client.body(reply, _MOST_BYTES, most_s) or b"")


def _decoded(reply: HttpReply | None, kind: type[T]) -> T | None:
    if reply is None or reply.status != 200:
        return None
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _said(reply: HttpReply) -> str:
    """What a response is, in words."""
    if reply.status != 200:
        return f"HTTP {reply.status}"
    return "it lists none" if reply.body else "its answer is too long"
