"""Turns exceptions of the hubs' clients, the network and the disk into errors of kt, each of which says what to do.

Every client and every version has errors of its own; the innermost known cause is what the user is told.
"""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Iterator, Sequence

from ktcli.errors import Gated, HubError, KtError, NotFound
from ktcli.store import catalog, tokens
from ktcli.store.profile import HUBS, typed
from ktcli.store.retrying import LONGEST_S, STATUSES, retry_after


@contextlib.contextmanager
def asking(hub: str, repository: str, revision: str) -> Iterator[None]:
    """Opens a context for calls of a hub's client library, which keeps its progress bars and log lines off the terminal
    and turns its exceptions into errors of kt.

    kt's own progress bar, if one is shown already, is not affected.
    """
    if hub == "ms":  # its clients reach it by `requests`, with the token as a cookie
        tokens.hold()
    with (
        explained(hub, repository, revision),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


@contextlib.contextmanager
def explained(hub: str, repository: str, revision: str) -> Iterator[None]:
    """Opens a context in which exceptions of the hub's client, the network and the disk become errors of kt that name
    the hub and the repository.
    """
    try:
        yield
    except KtError:
        raise
    except ImportError as error:
        if "socks" in str(error).lower():
            raise _no_socks(hub) from error
        raise HubError(
            f"the client of {HUBS[hub]} is not installed: {error}", hint="install kt again"
        ) from error
    except Exception as error:
        raise _explain(error, hub, repository, revision) from error


def _no_socks(hub: str) -> HubError:
    package = "pysocks" if hub == "ms" else "socksio"
    return HubError(
        f"{HUBS[hub]} must be reached through a SOCKS proxy, but the package {package} is not installed",
        hint=f"pip install {package}; or name an HTTP proxy in HTTPS_PROXY and unset ALL_PROXY",
    )


def _explain(error: Exception, hub: str, repository: str, revision: str) -> KtError:
    """The error that says to the user what the innermost known cause means."""
    causes = list(_causes(error))
    names = {name for cause in causes for name in (c.__name__ for c in type(cause).__mro__)}
    status = next((code for cause in causes if (code := _status(cause))), 0)
    where = HUBS[hub]
    if (of_disk := next(filter(None, map(_of_disk, causes)), None)) is not None:
        return of_disk
    word = next((said for cause in causes if (said := _error_code(cause))), "")
    if "GatedRepoError" in names or word == "GatedRepo" or status == 403:
        return _gated(hub, repository)
    if word == "EntryNotFound":
        return HubError(
            f"{repository} on {where} has changed: a listed file is missing",
            hint="run the same command again to get the new list",
        )
    if "RevisionNotFoundError" in names or word == "RevisionNotFound":
        return NotFound(
            f"{repository} on {where} has no revision {revision!r}", hint="leave out @revision"
        )
    if names & {"RepositoryNotFoundError", "NotExistError"} or status in (401, 404):
        return _not_there(hub, repository)
    if "InvalidSchema" in names and "SOCKS" in _first_line(causes[-1]):
        return _no_socks(hub)
    if "JSONDecodeError" in names:
        return HubError(
            f"{where} did not respond: it sent a web page instead of data about {repository}",
            hint="the network may require a browser login first, or a proxy may be interfering",
        )
    if status:
        return _refused(hub, repository, status, causes)
    return HubError(
        f"cannot get {repository} from {where}: {_first_line(causes[-1])}",
        hint=f"check the network, then run the command again; it continues. {_OTHER_WAY[hub]}",
        again_s=0.0 if names & _BROKEN else None,
    )


def _of_disk(cause: BaseException) -> HubError | None:
    if not isinstance(cause, OSError):
        return None
    if cause.errno == errno.ENOSPC:
        return HubError(
            "the disk is full", hint="free some space (kt list shows sizes) and pull again"
        )
    if cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HubError(
            f"cannot write {cause.filename}: {cause.strerror}",
            hint="set KT_HOME to another folder",
        )
    return None


def _gated(hub: str, repository: str) -> Gated:
    where, other = HUBS[hub], "ms" if hub == "hf" else "hf"
    hint = f"accept the licence on its page on {where}, create an access token there, and set {_TOKENS[hub]}"
    profile = catalog.by_repository(hub, repository)
    if profile is not None and other in profile.repositories:
        hint += f"; or try {HUBS[other]}: kt pull {profile.name} --from {_SPOKEN[other]}"
    return Gated(f"{repository} on {where} is gated: its licence must be accepted first", hint=hint)


def _not_there(hub: str, repository: str) -> NotFound:
    near = catalog.repositories_like(hub, repository)
    hint = (
        f"did you mean: {', '.join(typed(hub, each) for each in near)}"
        if near
        else f"check the spelling; kt search {repository.rpartition('/')[2]} --hub looks for it"
    )
    return NotFound(
        f"there is no repository {repository} on {HUBS[hub]}, or it is private",
        hint=f"{hint}; for a private repository set {_TOKENS[hub]}",
    )


def _refused(hub: str, repository: str, status: int, causes: Sequence[BaseException]) -> HubError:
    asked_s = next((s for cause in causes if (s := _asked_s(cause)) is not None), 0.0)
    when = f"in {asked_s / 60:.0f} minutes, as it requests" if asked_s > LONGEST_S else "later"
    return HubError(
        f"{HUBS[hub]} answered with error {status} for {repository}",
        hint=f"try again {when}: files that arrived are kept, and the same command continues",
        again_s=asked_s if status in STATUSES else None,
    )


_TOKENS = {"hf": "HF_TOKEN", "ms": "MODELSCOPE_API_TOKEN"}
_SPOKEN = {"hf": "hf", "ms": "modelscope"}
_OTHER_WAY = {
    "hf": "HF_ENDPOINT names a mirror; ms:org/repo gets the model from ModelScope",
    "ms": "hf:org/repo gets the model from Hugging Face",
}


# What broke a connection that was there, by the names of classes of the system, urllib3, requests and httpx. A server
# that nobody reaches is another matter: then the network is down, and nothing is waited for.
_BROKEN = frozenset({
    "BrokenPipeError", "ConnectionAbortedError", "ConnectionResetError", "ChunkedEncodingError", "IncompleteRead",
    "ProtocolError", "RemoteProtocolError", "ReadError", "WriteError",
})  # fmt: skip


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _status(error: BaseException) -> int:
    # ModelScope's client says it on the error itself.
    code = getattr(getattr(error, "response", error), "status_code", None)
    return code if isinstance(code, int) and code >= 400 else 0


def _asked_s(error: BaseException) -> float | None:
    """The seconds that a hub asks to wait; None: it does not."""
    said = getattr(error, "retry_after", None)  # of ModelScope's clients
    if isinstance(said, int | float) and not isinstance(said, bool):
        return max(0.0, float(said))
    return retry_after(error)


def _error_code(error: BaseException) -> str:
    """The word that Hugging Face adds to an error status; empty: none."""
    response = getattr(error, "response", None)
    return str(response.headers.get("X-Error-Code", "")) if response is not None else ""


def _first_line(error: BaseException) -> str:
    said = error.strerror if isinstance(error, OSError) else None
    line = (str(said or error).strip().splitlines() or [""])[0]
    return (line or type(error).__name__)[:200]
