"""The two hubs behind one small interface: the contents of a repository, the addresses of its files, and existing
local copies.

Their clients know the addresses, the tokens and the caches; `transfer` fetches. A client is imported when it is
first used: one of them takes seconds. What they raise becomes one of our errors in `huberrors`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ktcli.errors import UsageError
from ktcli.records import dataclass
from ktcli.store.huberrors import asking
from ktcli.store.partial import Located


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository; its SHA-256 and its hash as a git blob are empty where the hub does not say."""

    name: str
    size_bytes: int
    sha256: str = ""
    blob: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one moment.

    Attributes:
        revision: as exact as the hub makes it, a commit if it can.
        license: its name as the hub gives it; empty where it does not.
        gated: whether its makers want to be asked on its page first.
    """

    hub: str
    repository: str
    revision: str
    files: tuple[RemoteFile, ...]
    license: str = ""
    gated: bool = False


class Hub(Protocol):
    """A server of model repositories."""

    def look(self, repository: str, revision: str) -> Snapshot:
        """Returns a snapshot of a repository on the hub: its revision and files, with sizes and hashes; an empty
        revision is the default branch.
        """

    def locate(self, snapshot: Snapshot, file: RemoteFile) -> Located:
        """Returns what a download of a file of a snapshot needs: its URL, the HTTP headers to send, its size and
        hashes.
        """

    def cached(self, snapshot: Snapshot, name: str) -> Path | None:
        """Returns the path of a repository's file in the cache that the hub's own client keeps on this machine; None:
        it is not there.
        """


# What is anything else goes into no address and onto no screen.
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def _listed(name: object, size: object, sha256: object, blob: object = None) -> list[RemoteFile]:
    """The file that a row of a hub's list is; none where it has no name, which nobody could ask for."""
    if not isinstance(name, str) or not name:
        return []
    size_bytes = size if isinstance(size, int) and size > 0 else 0
    hashes = (str(each) if each else "" for each in (sha256, blob))
    return [RemoteFile(name, size_bytes, *hashes)]


def hub_named(name: str) -> Hub:
    """Returns the client of the hub with this short name: ModelScope for "ms", else Hugging Face ("hf")."""
    return ModelScope() if name == "ms" else HuggingFace()


def _endpoint_of(variable: str) -> str | None:
    """The address of the server that an environment variable names; None: the hub's own.

    Raises:
        UsageError: it is none, also where it is empty: the clients read the variable themselves.
    """
    said = os.environ.get(variable)
    if said is not None and not re.match(r"https?://[^/\s]", said):
        raise UsageError(
            f"{variable} is {said[:100]!r}, which is not a server address",
            hint=f"unset {variable}, or use an address that begins with https://",
        )
    return said.rstrip("/") if said else None


def _modelscope_endpoint() -> str | None:
    """The server of MODELSCOPE_ENDPOINT, else of MODELSCOPE_DOMAIN, which may be a name alone; None: the hub's own."""
    if "MODELSCOPE_ENDPOINT" in os.environ:
        return _endpoint_of("MODELSCOPE_ENDPOINT")
    said = os.environ.get("MODELSCOPE_DOMAIN")
    if said is None or said.startswith(("http://", "https://")):
        return _endpoint_of("MODELSCOPE_DOMAIN")
    if not re.fullmatch(r"[\w.-]+(:[0-9]{1,5})?", said, re.ASCII):
        raise UsageError(
            f"MODELSCOPE_DOMAIN is {said[:100]!r}, which is not a server name",
            hint="unset MODELSCOPE_DOMAIN, or use one like www.modelscope.ai",
        )
    return f"https://{said}"


class HuggingFace:
    """The hub Hugging Face through `huggingface_hub`, which reads HF_ENDPOINT (a mirror) and HF_TOKEN."""

    def __init__(self) -> None:
        self.endpoint = _endpoint_of("HF_ENDPOINT")
        # Read when the client is imported: a pull asks for the model and for nothing else.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

    def look(self, repository: str, revision: str) -> Snapshot:
        """Returns a snapshot of a repository on Hugging Face: its commit, files and license, and whether it is gated;
        an empty revision is the default branch.
        """
        with asking("hf", repository, revision):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=self.endpoint, library_name="kt")
            info = api.model_info(
                repository, revision=revision or None, files_metadata=True, timeout=30
            )
            files = []
            for sibling in info.siblings or ():
                lfs: Any = sibling.lfs
                # Of a large file only its pointer is a blob.
                blob = None if lfs else sibling.blob_id
                sha256 = getattr(lfs, "sha256", None)
                files += _listed(sibling.rfilename, sibling.size, sha256, blob)
            tags = [tag for tag in info.tags or () if tag.startswith("license:")]
            named = tags[0].removeprefix("license:")[:60] if tags else ""
            license_ = named if named.isprintable() else ""
            commit = info.sha if info.sha and _COMMIT.fullmatch(info.sha) else revision
            return Snapshot("hf", repository, commit, tuple(files), license_, bool(info.gated))

    def locate(self, snapshot: Snapshot, file: RemoteFile) -> Located:
        """Returns what a download of a file of a snapshot needs: its URL, the HTTP headers of `huggingface_hub` with
        its token, its size and hashes.
        """
        with asking("hf", snapshot.repository, snapshot.revision):
            from huggingface_hub import hf_hub_url
            from huggingface_hub.utils._headers import build_hf_headers

            revision = snapshot.revision or None
            url = hf_hub_url(
                snapshot.repository, file.name, revision=revision, endpoint=self.endpoint
            )
            return _located(file, url, build_hf_headers(library_name="kt"))

    def cached(self, snapshot: Snapshot, name: str) -> Path | None:
        """Returns the path of a snapshot's file in the cache of `huggingface_hub` on this machine, where any revision
        with the same contents will do; None: it is not there.
        """
        with asking("hf", snapshot.repository, snapshot.revision):
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(
                snapshot.repository, name, revision=snapshot.revision or None
            )
            return Path(found) if isinstance(found, str) else _blob(snapshot, name)


def _blob(snapshot: Snapshot, name: str) -> Path | None:
    """The file in the client's cache as any revision has it: there it is called by its hash."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=snapshot.repository, repo_type="model")
    for file in snapshot.files:
        if file.name == name and (called := file.sha256 or file.blob):
            path = Path(constants.HF_HUB_CACHE, folder, "blobs", called)
            return path if called.isalnum() and path.is_file() else None
    return None


def _located(file: RemoteFile, url: str, headers: Mapping[str, str]) -> Located:
    pairs = tuple(sorted(headers.items()))
    return Located(file.name, file.size_bytes, url, pairs, file.sha256, file.blob)


class ModelScope:
    """The hub ModelScope through `modelscope`; MODELSCOPE_ENDPOINT or MODELSCOPE_DOMAIN names another server."""

    def __init__(self) -> None:
        self.endpoint = _modelscope_endpoint()
        # Read when the client is imported: its five attempts take up to a minute, in silence; ours are in `retrying`.
        os.environ.setdefault("MODELSCOPE_API_MAX_RETRIES", "1")
        os.environ.setdefault("MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS", "2")

    def look(self, repository: str, revision: str) -> Snapshot:
        """Returns a snapshot of a repository on ModelScope: its revision and files; an empty revision is the branch
        master.
        """
        with asking("ms", repository, revision):
            files = tuple(self._files(repository, revision or "master"))
            return Snapshot("ms", repository, revision or "master", files)

    def _files(self, repository: str, revision: str) -> Iterator[RemoteFile]:
        try:  # newer clients have a package below them, and leave the hashes out above it
            from modelscope_hub import HubApi as Below
        except ImportError:
            from modelscope.hub.api import HubApi

            api = HubApi(endpoint=self.endpoint)
            for row in api.get_model_files(repository, revision=revision, recursive=True):
                if row.get("Type", "blob") != "tree":
                    yield from _listed(row.get("Path"), row.get("Size"), row.get("Sha256"))
            return
        for file in Below(endpoint=self.endpoint).list_repo_files(
            repository, "model", revision=revision
        ):
            if not file.is_dir:
                yield from _listed(file.path, file.size, file.sha256)

    def locate(self, snapshot: Snapshot, file: RemoteFile) -> Located:
        """Returns what a download of a file of a snapshot needs: its URL, the HTTP headers of ModelScope's client with
        its token's cookies, its size and hashes.
        """
        with asking("ms", snapshot.repository, snapshot.revision):
            from modelscope.hub.api import HubApi, ModelScopeConfig
            from modelscope.hub.file_download import get_file_download_url

            url = get_file_download_url(
                snapshot.repository, file.name, snapshot.revision, endpoint=self.endpoint
            )
            headers = {"User-Agent": ModelScopeConfig.get_user_agent()}
            token = os.environ.get("MODELSCOPE_API_TOKEN") or None
            cookies = HubApi(endpoint=self.endpoint).get_cookies(token)
            if cookies:
                headers["Cookie"] = "; ".join(f"{each.name}={each.value}" for each in cookies)
            return _located(file, url, headers)

    def cached(self, snapshot: Snapshot, name: str) -> Path | None:
        """Returns the path of a repository's file in a cache of ModelScope's clients, old or new, on this machine;
        None: it is not there.
        """
        owner, _, repository = snapshot.repository.partition("/")
        revision = snapshot.revision or "master"
        places = [f"models/{owner}--{repository}/snapshots/{revision}"]
        # Clients up to 1.37; they wrote dots as underscores, earlier ones did not.
        for spelled in (repository.replace(".", "___"), repository):
            places += [f"models/{owner}/{spelled}", f"{owner}/{spelled}"]
        for root in _modelscope_caches():
            for place in places:
                if (path := root / place / name).is_file():
                    return path
        return None


def _modelscope_caches() -> tuple[Path, ...]:
    """The folders that clients of ModelScope keep files in; older ones had theirs in `hub`."""
    root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()
    return root, root / "hub"
