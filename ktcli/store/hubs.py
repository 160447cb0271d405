"""The two hubs behind one small interface: what a repository holds, and fetching files of it.

Their clients do the transport (ranges, retries, resuming, tokens, proxies); kt decides which files, and
checks what came. A client is imported when it is first used: one of them takes seconds. Whatever they
raise becomes one of our errors here, because every client and every version has its own.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ktcli.errors import HubError, KtError, NotFound, UsageError
from ktcli.store.reference import HUBS, Reference


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository; `sha256` is empty where the hub does not say."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one moment; `revision` is as exact as the hub makes it, a commit if it can."""

    hub: str
    repository: str
    revision: str
    files: tuple[RemoteFile, ...]


class Hub(Protocol):
    """A place that serves models."""

    def look(self, repository: str, revision: str) -> Snapshot:
        """Asks the hub for the files of a repository; an empty revision is the default branch."""

    def fetch(self, snapshot: Snapshot, names: Sequence[str], folder: Path) -> None:
        """Bring these files into `folder`, continuing what an earlier call began."""


def hub_of(reference: Reference) -> Hub:
    """The client of a reference's hub."""
    return ModelScope() if reference.hub == "ms" else HuggingFace()


def _endpoint(variable: str) -> str | None:
    """The address of the server that an environment variable names; None: the hub's own.

    Raises:
        UsageError: it is none, also where it is empty: the clients read the variable themselves.
    """
    said = os.environ.get(variable)
    if said is not None and not re.match(r"https?://[^/\s]", said):
        raise UsageError(
            f"{variable} is {said[:100]!r}, which is no address of a server",
            hint=f"unset {variable}, or write an address that begins with https://",
        )
    return said


class HuggingFace:
    """Reaches Hugging Face through `huggingface_hub`, which reads HF_ENDPOINT (a mirror) and HF_TOKEN."""

    def __init__(self) -> None:
        self._endpoint = _endpoint("HF_ENDPOINT")
        # Read when the client is imported: a pull asks for the model and for nothing else.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

    def look(self, repository: str, revision: str) -> Snapshot:
        with _client("hf", repository, revision):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=self._endpoint, library_name="kt")
            info = api.model_info(
                repository, revision=revision or None, files_metadata=True, timeout=30
            )
            files = []
            for sibling in info.siblings or ():
                lfs: Any = sibling.lfs
                sha256 = getattr(lfs, "sha256", "") or ""
                files.append(RemoteFile(sibling.rfilename, sibling.size or 0, sha256))
            return Snapshot("hf", repository, info.sha or revision, tuple(files))

    def fetch(self, snapshot: Snapshot, names: Sequence[str], folder: Path) -> None:
        with _client("hf", snapshot.repository, snapshot.revision):
            from huggingface_hub import snapshot_download

            _remove_orphans(folder)
            snapshot_download(
                snapshot.repository,
                revision=snapshot.revision or None,
                local_dir=folder,
                allow_patterns=list(names),
                endpoint=self._endpoint,
                library_name="kt",
            )


# Newer clients give each attempt's partial file a random name and never continue it. Older ones
# go on with "<hash>.<etag>.incomplete", which this does not match.
_ORPHAN = re.compile(r".+\.[0-9a-f]{40,}\.[0-9a-f]{8}\.incomplete")


def _remove_orphans(folder: Path) -> None:
    """Free the space of partial files that nobody will continue."""
    for path in (folder / ".cache/huggingface/download").glob("*.incomplete"):
        if _ORPHAN.fullmatch(path.name):
            path.unlink(missing_ok=True)


class ModelScope:
    """Reaches ModelScope through `modelscope`, which reads MODELSCOPE_ENDPOINT (another server)."""

    def __init__(self) -> None:
        self._endpoint = _endpoint("MODELSCOPE_ENDPOINT")

    def look(self, repository: str, revision: str) -> Snapshot:
        with _client("ms", repository, revision):
            from modelscope.hub.api import HubApi

            api = HubApi(endpoint=self._endpoint)
            listed = api.get_model_files(repository, revision=revision or "master", recursive=True)
            files = tuple(
                RemoteFile(
                    str(row["Path"]), int(row.get("Size") or 0), str(row.get("Sha256") or "")
                )
                for row in listed
                if row.get("Type", "blob") != "tree"
            )
            return Snapshot("ms", repository, revision or "master", files)

    def fetch(self, snapshot: Snapshot, names: Sequence[str], folder: Path) -> None:
        with _client("ms", snapshot.repository, snapshot.revision):
            from modelscope.hub.snapshot_download import snapshot_download

            snapshot_download(
                snapshot.repository,
                revision=snapshot.revision,
                local_dir=str(folder),
                allow_patterns=list(names),
                endpoint=self._endpoint,
            )


@contextlib.contextmanager
def _client(hub: str, repository: str, revision: str) -> Iterator[None]:
    """Runs client code: keeps its own bars and log lines off the terminal and turns its errors into ours.

    A progress bar of ours that is already shown keeps the stream it began with.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    except KtError:
        raise
    except ImportError as error:
        raise HubError(
            f"the client of {HUBS[hub]} is not installed: {error}", hint="install kt again"
        ) from error
    except Exception as error:
        raise _explain(error, hub, repository, revision) from error


def _explain(error: Exception, hub: str, repository: str, revision: str) -> KtError:
    """The error that says to the user what the innermost known cause means."""
    causes = list(_causes(error))
    names = {name for cause in causes for name in (c.__name__ for c in type(cause).__mro__)}
    status = next((code for cause in causes if (code := _status(cause))), 0)
    where = HUBS[hub]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return HubError(
                "the disk is full", hint="free some space (kt list shows sizes) and pull again"
            )
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return HubError(
                f"cannot write {cause.filename}: {cause.strerror}",
                hint="set KT_HOME to another folder",
            )
    if "GatedRepoError" in names or status == 403:
        hint = f"accept its licence on its page on {where}, make a token there, and set HF_TOKEN"
        return HubError(
            f"{repository} on {where} is open only to those who accept its licence", hint=hint
        )
    if "RevisionNotFoundError" in names:
        return NotFound(
            f"{repository} on {where} has no revision {revision!r}", hint="leave @revision away"
        )
    if names & {"RepositoryNotFoundError", "NotExistError"} or status in (401, 404):
        hint = (
            "check the spelling; for a private repository set HF_TOKEN"
            if hub == "hf"
            else "check the spelling"
        )
        return NotFound(
            f"there is no repository {repository} on {where}, or it is private", hint=hint
        )
    if status:
        return HubError(
            f"{where} answered with error {status} for {repository}",
            hint="try again in a while: what arrived is kept, the same command continues",
        )
    return HubError(
        f"cannot get {repository} from {where}: {_first_line(causes[-1])}",
        hint=f"check the network, then run the command again; it continues. {_OTHER_WAY[hub]}",
    )


_OTHER_WAY = {
    "hf": "HF_ENDPOINT names a mirror; ms:org/repo takes the model from ModelScope",
    "ms": "hf:org/repo takes the model from Hugging Face",
}


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _status(error: BaseException) -> int:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) and code >= 400 else 0


def _first_line(error: BaseException) -> str:
    said = error.strerror if isinstance(error, OSError) else None
    line = (str(said or error).strip().splitlines() or [""])[0]
    return (line or type(error).__name__)[:200]
