"""HTTP errors: a status, a type and a code, which each API puts into its own envelope."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ktcli.errors import (
    BadCheckpoint,
    Busy,
    ContextFull,
    DeviceError,
    KtError,
    NoMemoryLeft,
    NotEnoughMemory,
    NotFound,
    QueueFull,
    UsageError,
)
from ktcli.records import dataclass

RETRY_S = 2  # after which a client may try again where a queue was full
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Errors, with the status and the code of each; the first that fits counts.
_STATUS: tuple[tuple[type[Exception], int, str | None], ...] = (
    (ContextFull, 400, "context_length_exceeded"),
    (QueueFull, 429, "queue_full"),
    (Busy, 503, "busy"),
    (NotEnoughMemory, 503, "not_enough_memory"),
    (NoMemoryLeft, 503, "not_enough_memory"),
    (NotFound, 404, "model_not_found"),
    (UsageError, 400, "unsupported_value"),
    (BadCheckpoint, 400, "template_error"),
    (DeviceError, 503, "device_failed"),
)


# By these words programs tell that a shorter conversation would do (Claude Code and LiteLLM, whatever the code).
_TOO_LONG = "the prompt is too long and exceeds the available context size"


@dataclass(eq=False)
class Refusal(Exception):
    """An HTTP error, raised for a request that cannot be answered.

    Attributes:
        status: of HTTP.
        message: one sentence.
        field: the name of the field that is wrong; empty: none.
        code: a word for programs; empty: none.
        retry_s: the seconds after which the client may try again, sent with 429 and 503.
    """

    status: int
    message: str
    field: str = ""
    code: str = ""
    retry_s: int = RETRY_S

    @property
    def kind(self) -> str:
        """The type of the error in the APIs, such as "not_found_error" for the status 404; "api_error" for a status
        without one."""
        return _KINDS.get(self.status, "api_error")

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that belong to the status: `WWW-Authenticate` for 401, `Retry-After` for 429 and 503,
        else none."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(self.retry_s)} if self.status in (429, 503) else {}

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Returns the HTTP error that the client receives for an exception."""
        if isinstance(error, Refusal):
            return error
        if not isinstance(error, KtError):
            return cls(500, f"internal server error ({type(error).__name__})", "", "internal_error")
        hint = f" ({error.hint})" if error.hint else ""
        why = f"{_TOO_LONG}: " if isinstance(error, ContextFull) else ""
        for kind, status, code in _STATUS:
            if isinstance(error, kind):
                return cls(status, f"{why}{error}{hint}", "", code or "")
        return cls(500, f"{error}{hint}", "", "engine_error")


class FieldNames(dict[str, str]):
    """What a request calls its fields, by kt's names; a field that is not in it has kt's name."""

    def __missing__(self, field: str) -> str:
        return field


OWN_NAMES = FieldNames()


@contextmanager
def about(field: str) -> Iterator[None]:
    """Opens a context in which a UsageError becomes a Refusal with the status 400 that names the field, also in its
    message."""
    try:
        yield
    except UsageError as error:
        said = str(error)
        if not said.startswith(field):
            said = f"{field}: {said}"
        raise bad_value(field, said) from error


def bad_value(field: str, message: str) -> Refusal:
    """Returns the HTTP error, of status 400, that says that the value of a field cannot be used."""
    return Refusal(400, message, field, "unsupported_value")


def bad_field(field: str, what: str) -> Refusal:
    """Returns the HTTP error, of status 400, for a field that cannot be used; its message is the field's name and then
    `what`."""
    return bad_value(field, f"{field} {what}")


def require_at_most(field: str, count: int, most: int) -> None:
    """Checks that the field of a request has at most `most` entries. Raises: Refusal: it has more."""
    if count > most:
        raise bad_field(field, f"has {count:,} entries; the limit is {most:,}")


def require_within(field: str, value: int, least: int, most: int | None) -> None:
    """Checks that the number in a field is within limits. Raises: Refusal: it is below `least` or above `most`."""
    if value < least or (most is not None and value > most):
        range_ = f"at least {least}" if most is None else f"between {least} and {most}"
        raise bad_field(field, f"must be {range_}, not {value}")


def not_found(what: str, field: str = "") -> Refusal:
    """Returns the HTTP error, of status 404, for a request, or a field of it, that names what the server does not
    have."""
    return Refusal(404, f"Not Found: {what}", field, "not_found")


def no_path(request: Request) -> Refusal:
    """Returns the HTTP error, of status 404, for a path that the server does not have."""
    return not_found(request.url.path[:200])


def text_in(item: Mapping[str, Any], name: str, where: str) -> str:
    """Returns the string in the field `name` of an item of a request; `where` names the item in errors.

    Raises:
        Refusal: the field is missing, or is not a string.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", "must be a string")
    return value


def refusal_of(request: Request, error: Exception) -> Refusal:
    """Returns the HTTP error for an exception; writes a line to the server's log if it is unexpected."""
    if isinstance(error, HTTPException):
        return _of_starlette(request, error)
    refusal = Refusal.of(error)
    if refusal.code == "internal_error":
        request.app.state.server.listener.warn(_log_line_of(error))
    return refusal


def _of_starlette(request: Request, error: HTTPException) -> Refusal:
    path = request.url.path[:200]
    doubled = " (set the address without /v1)" if path.startswith(("/v1/v1/", "/v1/api/")) else ""
    said = {
        404: f"Not Found: {path}{doubled}",
        405: f"Method Not Allowed: {request.method} {path}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "")
    return Refusal(error.status_code, said.get(error.status_code, error.detail), "", code)


def _log_line_of(error: Exception) -> str:
    """Returns the log line of an unexpected exception: its type and call stack, without anything a client sent."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.name} ({frame.lineno})" for frame in reversed(frames[-4:]))
    return f"internal error: {type(error).__name__} in {where}; the server keeps running"
