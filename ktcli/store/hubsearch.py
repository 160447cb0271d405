"""Searches a hub for models by words, and reads the `config.json` of the results; nothing else is downloaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ktcli.errors import HubError, NotFound, UsageError
from ktcli.records import dataclass
from ktcli.store import tokens
from ktcli.store.huberrors import asking, explained
from ktcli.store.hubs import HuggingFace, ModelScope, RemoteFile, Snapshot, hub_named
from ktcli.store.partial import Located
from ktcli.store.profile import HUBS, typed
from ktcli.store.reference import parse
from ktcli.store.retrying import STATUSES, Tell, silent, with_retries
from ktcli.threadpool import Threads

CONFIG = "config.json"
AT_ONCE = 4  # configs that are asked for at the same time
_CONNECT_S, _READ_S = 10.0, 20.0
_WHAT = "the list of models"
_DENIED = (401, 403)


@dataclass(frozen=True, slots=True)
class Hit:
    """A repository that a hub found.

    Attributes:
        repository: its id, one that a pull can be asked for.
        downloads: as the hub counts them; None: it does not say.
        gated: whether its makers want to be asked on its page first.
        gguf: whether it holds GGUF files, as far as its name and its tags tell.
    """

    hub: str
    repository: str
    downloads: int | None = None
    gated: bool = False
    gguf: bool = False

    @property
    def reference(self) -> str:
        """The repository as any kt command takes it: "org/repo", or "ms:org/repo" on ModelScope."""
        return typed(self.hub, self.repository)


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """The `config.json` of a repository; where there is no `data`, `problem` is the reason."""

    hit: Hit
    data: bytes = b""
    problem: str = ""


def search_hub(hub: str, words: str, limit: int, tell: Tell = silent) -> tuple[Hit, ...]:
    """Returns at most `limit` repositories that a hub's search finds for `words`, the most downloaded ones first.

    Args:
        tell: is given a sentence when the hub is waited for.
    Raises:
        HubError: the hub does not respond, or its client cannot search.
    """

    def ask() -> list[Hit]:
        with asking(hub, _WHAT, ""):
            find = _modelscope if hub == "ms" else _hugging_face
            return list(find(words, limit))

    try:
        found = with_retries(ask, tell)
    except NotFound as error:
        raise HubError(f"{HUBS[hub]} does not support searches", hint=error.hint) from error
    return tuple(hit for hit in found if _can_be_asked_for(hit))[:limit]


def read_configs(
    hits: Sequence[Hit], most_bytes: int, tell: Tell = silent
) -> Iterator[FoundConfig]:
    """Yields the contents of `config.json` of each repository, or the reason why there are none, in the order of
    `hits`; up to AT_ONCE are requested at a time.

    Args:
        most_bytes: a longer file is not taken.
        tell: is given a sentence when a hub is waited for, from any thread.
    """
    places, stop = [_config_place(hit) for hit in hits], threading.Event()
    with Threads(AT_ONCE, "kt-search") as pool:
        tasks = [
            pool.submit(_read, hit, place, most_bytes, tell, stop)
            for hit, place in zip(hits, places, strict=True)
        ]
        try:
            for task in tasks:
                yield task.result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _hugging_face(words: str, limit: int) -> Iterator[Hit]:
    endpoint = HuggingFace().endpoint
    import requests
    from huggingface_hub import HfApi, constants

    # The client itself would ask a server that nobody reaches, or that is busy, for half a minute and in silence.
    answer = requests.head(endpoint or constants.ENDPOINT, timeout=_CONNECT_S)
    if answer.status_code in STATUSES:
        answer.raise_for_status()
    api = HfApi(endpoint=endpoint, library_name="kt")
    models = api.list_models(
        search=words, sort="downloads", limit=limit, expand=["downloads", "gated", "tags"]
    )
    for info in models:
        gguf = "gguf" in (info.tags or ()) or _is_gguf(info.id)
        yield Hit("hf", info.id, info.downloads, bool(info.gated), gguf)


def _modelscope(words: str, limit: int) -> Iterator[Hit]:
    endpoint = ModelScope().endpoint
    try:
        from modelscope_hub import HubApi
    except ImportError as error:
        raise HubError(
            "this version of the client of ModelScope cannot search",
            hint="update it: pip install --upgrade modelscope",
        ) from error
    api = HubApi(endpoint=endpoint)
    page = api.list_repos("model", search=words, sort="downloads", page_size=limit)
    for info in page.items:
        name = f"{info.owner}/{info.name}"
        yield Hit("ms", name, info.downloads, bool(info.gated), _is_gguf(name))


def _is_gguf(repository: str) -> bool:
    return repository.lower().endswith("gguf")


def _can_be_asked_for(hit: Hit) -> bool:
    """Refuses ids that are none: they come from a server and are printed as commands."""
    try:
        return parse(f"{hit.hub}:{hit.repository}").repository == hit.repository
    except UsageError:
        return False


def _config_place(hit: Hit) -> Located:
    revision = "master" if hit.hub == "ms" else ""
    return hub_named(hit.hub).locate(
        Snapshot(hit.hub, hit.repository, revision, ()), RemoteFile(CONFIG, 0)
    )


def _read(
    hit: Hit, place: Located, most_bytes: int, tell: Tell, stop: threading.Event
) -> FoundConfig:
    try:
        return with_retries(partial(_asked, hit, place, most_bytes), tell, stop.wait)
    except HubError:
        return FoundConfig(hit, problem="the hub does not respond")


def _asked(hit: Hit, place: Located, most_bytes: int) -> FoundConfig:
    import requests

    tokens.hold()
    with (
        explained(hit.hub, hit.repository, ""),
        requests.get(
            place.url, headers=dict(place.headers), stream=True, timeout=(_CONNECT_S, _READ_S)
        ) as answer,
    ):
        if answer.status_code in STATUSES:
            answer.raise_for_status()
        if answer.status_code in _DENIED:
            return FoundConfig(hit, problem="gated")
        if answer.status_code >= 400:
            missing = answer.status_code == 404
            why = (
                f"no {CONFIG}" if missing else f"the hub responded with status {answer.status_code}"
            )
            return FoundConfig(hit, problem=why)
        return _bounded(hit, answer, most_bytes)


def _bounded(hit: Hit, answer: Any, most_bytes: int) -> FoundConfig:
    data = bytearray()
    for piece in answer.iter_content(64 << 10):
        data += piece
        if len(data) > most_bytes:
            return FoundConfig(hit, problem=f"its {CONFIG} is too long")
    return FoundConfig(hit, bytes(data))
