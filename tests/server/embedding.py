"""Serves a small random embedding model, alone or beside a model that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from convert import convert_checkpoint
from embedders import CONTEXT, Judge, write_embedder
from server.running import Running, scripted, serving_models
from server.sources import ScriptedModel

from ktcli.assembly.ready import Ready
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import Opening
from ktcli.engine.scheduler import Limits
from ktcli.hardware.gpu import CPU
from ktcli.server.models.source import FOREVER, ModelSource

NAME = "embedder"


@dataclass
class Embedding:
    """A server that makes embeddings, and who judges them."""

    running: Running
    judge: Judge

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(self.running.url + path, json=body, timeout=60)

    def vectors(self, texts: Any, **more: Any) -> list[list[float]]:
        """The embeddings of texts by OpenAI's API."""
        answer = self.post("/v1/embeddings", model=NAME, input=texts, **more)
        assert answer.ok, answer.text
        rows = answer.json()["data"]
        assert [each["index"] for each in rows] == list(range(len(rows)))
        return [each["embedding"] for each in rows]

    def refused(self, path: str, **body: Any) -> str:
        """The sentence with which a request is refused."""
        answer = self.post(path, **body)
        assert answer.status_code == 400, (answer.status_code, answer.text[:300])
        error = answer.json()["error"]
        return str(error if isinstance(error, str) else error["message"])


def stored(
    folder: Path, mode: str = "last", context: int = CONTEXT, **more: Any
) -> tuple[ModelSource, Judge]:
    """An embedding model of the library, and its judge; `more` as of `write_embedder`."""
    made = write_embedder(folder / "model", mode, **more)
    pack = convert_checkpoint(made, folder / "pack", experts="int8", dense="int8")
    wanted = Wanted(context, 2, streams=4, device=DeviceWords(device=CPU))
    how = Opening(wanted, 0, False)
    return ModelSource(Ready(NAME, pack), NAME, how, FOREVER), Judge(made)


@contextmanager
def embedding(
    folder: Path, mode: str = "last", *, chats: bool = False, **more: Any
) -> Iterator[Embedding]:
    """Serves an embedding model while the context lasts.

    Args:
        chats: whether the server's own model is one that follows a script, beside it.
        more: see `write_embedder`.
    """
    own, judge = stored(folder, mode, **more)
    models: list[ModelSource] = [own]
    if chats:
        (folder / "chat").mkdir()
        models.insert(0, ScriptedModel(scripted(folder / "chat", lambda text: "hello " * 60)))
    with serving_models(models, limits=Limits(active=4)) as running:
        yield Embedding(running, judge)
