"""Asks servers what they are: kt serve, vLLM, SGLang and llama-server, through the paths that each of them has.

A server may answer anything: what it says is bounded in size and time, and what makes no sense counts as not said.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from ktcli.client.address import ServerAddress
from ktcli.errors import KtError, UsageError
from ktcli.server.router.counters import Counters, counters_in, mean, ratio
from ktcli.server.router.facts import ServerFacts
from ktcli.threads import Threads

T = TypeVar("T")

ANSWER_S = 10.0  # in which a server has answered one question
_MOST_BYTES = 4 << 20
_SHOWN = 200
_LEAST_TOKENS = (
    2000  # that a server has looked up before shares of them are taken for its traffic's
)
_AT_ONCE = 16
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Unreachable(KtError):
    """A server does not answer; it may later."""


class HttpReply(NamedTuple):
    """The response of a server.

    Attributes:
        body: whole, or empty if it is too long.
    """

    status: int
    body: bytes


class _ModelRow(msgspec.Struct):
    id: _Text
    max_model_len: _Count | None = None


class _ModelRows(msgspec.Struct):
    data: Annotated[list[_ModelRow], msgspec.Meta(max_length=10_000)]


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


class _Info(msgspec.Struct):
    """What `/server_info` of kt serve and SGLang says."""

    max_running_requests: _Count | None = None
    decode_tok_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


def facts_of_those_there(
    addresses: Sequence[ServerAddress], key: str, model: str = ""
) -> tuple[tuple[ServerFacts, ...], tuple[tuple[ServerAddress, KtError], ...]]:
    """Returns the facts of the servers that answer, and the others with the reasons; all are asked at the same time.

    Args:
        key: the API key to show; empty: none.
        model: the one that is wanted; empty: the only one, or the server's own.
    Raises:
        KtError: none answers, or one that does cannot be used; of several the first.
    """

    def asked(address: ServerAddress) -> ServerFacts | Unreachable:
        try:
            return facts_of(address, key, model)
        except Unreachable as error:
            return error

    with Threads(min(_AT_ONCE, len(addresses)), "kt-asking") as team:
        found = list(team.map(asked, addresses))
    servers = tuple(each for each in found if isinstance(each, ServerFacts))
    absent = tuple(
        (address, each)
        for address, each in zip(addresses, found, strict=True)
        if isinstance(each, Unreachable)
    )
    if not servers:
        raise absent[0][1]
    return servers, absent


def facts_of(address: ServerAddress, key: str, model: str = "") -> ServerFacts:
    """Returns the facts of a server; see `facts_of_those_there`.

    Raises:
        KtError: nobody answers, the key is refused, or it does not say which model it serves.
    """
    reply = ask(address, "/v1/models", key)
    if reply.status in (401, 403):
        raise UsageError(
            f"{address.url} {'refuses the' if key else 'needs an'} API key",
            hint="servers and router take the same key: put it into a file, passed with --api-key-file",
        )
    rows = _decoded(reply, _ModelRows)
    if rows is None or not rows.data:
        raise KtError(
            f"{address.url} does not say which models it serves: {_said(reply)}",
            hint="a router takes servers that speak OpenAI's API, such as kt serve",
        )
    props = _decoded(_asked_or_none(address, "/props", key), _Props) or _Props()
    row = _row(address, rows.data, model or props.model_alias)
    info = _decoded(_asked_or_none(address, "/server_info", key), _Info) or _Info()
    metrics = _asked_or_none(address, "/metrics", key)
    found = ServerFacts(
        address.url,
        row.id,
        row.max_model_len or props.default_generation_settings.n_ctx,
        props.total_slots or info.max_running_requests,
        tuple(each.id for each in rows.data),
        1 / info.decode_tok_s if info.decode_tok_s else None,
        program=props.build_info,
    )
    is_counted = metrics is not None and metrics.status == 200
    return with_counters(found, counters_in(metrics.body)) if metrics and is_counted else found


def with_counters(facts: ServerFacts, counters: Counters) -> ServerFacts:
    """Returns the facts of a server with what its counters say of its traffic."""
    measured_s = mean(counters, "inter_token_latency_seconds", "time_per_output_token_seconds")
    return replace(
        facts,
        token_s=facts.token_s or measured_s,
        common=ratio(
            counters, "first_prompt_cache_hits", "first_prompt_cache_queries", _LEAST_TOKENS
        ),
        cached=ratio(counters, "prefix_cache_hits", "prefix_cache_queries", _LEAST_TOKENS),
    )


def _row(address: ServerAddress, rows: Sequence[_ModelRow], wanted: str) -> _ModelRow:
    """The row of the model that is served.

    Raises:
        UsageError: there are several, and nobody says which is meant.
    """
    for row in rows:
        if row.id == wanted:
            return row
    names = ", ".join(each.id for each in rows[:5])
    if wanted:
        raise UsageError(f"{address.url} does not serve {wanted[:_SHOWN]}; it has {names}")
    if len(rows) > 1:
        raise UsageError(
            f"{address.url} serves several models: {names}", hint="name one with --model"
        )
    return rows[0]


def _asked_or_none(address: ServerAddress, path: str, key: str) -> HttpReply | None:
    try:
        return ask(address, path, key)
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
    """Returns the response of a server to a request.

    Args:
        answer_s: the seconds that it may take; 0: `ANSWER_S`.
    Raises:
        KtError: it does not answer in time, or its certificate cannot be trusted.
    """
    headers = {"Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        data, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
    most_s = answer_s or ANSWER_S
    with _faults(address), _connected(address, most_s) as connection:
        connection.request(method, path, data, headers)
        with connection.getresponse() as reply:
            return HttpReply(reply.status, _bounded(reply, time.monotonic() + most_s))


def _bounded(reply: Any, until: float) -> bytes:
    """The body of a response; empty if it is too long. Raises: TimeoutError: it does not end."""
    parts, size = [], 0
    while part := reply.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            return b""
        if time.monotonic() > until:
            raise TimeoutError("timed out")
    return b"".join(parts)


@contextmanager
def _connected(address: ServerAddress, answer_s: float) -> Iterator[HTTPConnection]:
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = kind(address.host, address.port, timeout=answer_s)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _faults(address: ServerAddress) -> Iterator[None]:
    """Turns the errors of a connection into one sentence."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise KtError(
            f"the certificate of {address.url} cannot be trusted: {error.verify_message}",
            hint="give the server a certificate that this machine trusts, or use http:// in a network of your own",
        ) from error
    except (OSError, HTTPException, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Unreachable(
            f"{address.url} does not answer: {said[:_SHOWN]}",
            hint="start a server there with: kt serve NAME --host ADDRESS --api-key-file FILE",
        ) from error


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
    return "its list of models is malformed" if reply.body else "its answer is too long"
