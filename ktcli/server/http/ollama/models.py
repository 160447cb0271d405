"""Ollama's requests about models: their names and capabilities, the server's version, and changes to the library where
they are allowed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ktcli.models.pooling import PoolingMode
from ktcli.server.http.answering import ALIVE_S, App, encode, json_response, stamp
from ktcli.server.http.body import body_of
from ktcli.server.http.constraints import not_supported
from ktcli.server.http.guard import is_owner
from ktcli.server.http.ollama.chat import ALIVE, LINES
from ktcli.server.http.refusals import Refusal, no_path
from ktcli.server.http.state import ServerState, state_of
from ktcli.server.models.libraryeditor import LibraryEditor, PullStep
from ktcli.server.models.source import ModelFacts, ModelSource
from ktcli.store.modelfile import parameter_lines
from ktcli.store.preset import Preset
from ktcli.threadpool import Threads

VERSION = "0.12.0"  # of the API that is spoken; some clients want at least 0.6.4, in digits
# llama.cpp's numbers, of metadata in GGUF files.
POOLING_TYPES = {PoolingMode.MEAN: 1, PoolingMode.FIRST: 2, PoolingMode.LAST: 3}
_NEVER = "9999-12-31T00:00:00Z"


class ModelAsked(msgspec.Struct):
    """A request about a model."""

    model: str = ""
    name: str = ""

    @property
    def said(self) -> str:
        """The name of the model: the field `model`, or `name` if that is empty."""
        return self.model or self.name


async def version(request: Request) -> Response:
    """Returns the version of Ollama's API that is spoken.

    Sends it as JSON in the field `version`.
    """
    return json_response({"version": VERSION})


async def tags(request: Request) -> Response:
    """Responds with the models of the library: the server's own first, then those in memory.

    Sends JSON whose `models` has for each its `name`, the same as `model`, `modified_at`, `size` (bytes), `digest`,
    `capabilities` and `details`.
    """
    return json_response({"models": await state_of(request).rows(_row)})


async def running(request: Request) -> Response:
    """Responds with the models in memory.

    Sends JSON whose `models` has for each its `name`, the same as `model`, `modified_at`, `size` (bytes), `digest`,
    `capabilities`, `details`, `size_vram` (bytes), `context_length` (tokens) and `expires_at`.
    """
    rows = []
    for each in state_of(request).residency.loaded:
        row, engine = _row(each.source, each.facts, each.model.name), each.model.backend.engine
        vram = each.fit.vram_bytes
        size = {"size": each.fit.taken_bytes + vram, "size_vram": vram}
        about = {**size, "context_length": engine.context}
        rows.append(
            {**row, **about, "expires_at": _NEVER if each.expires is None else stamp(each.expires)}
        )
    return json_response({"models": rows})


async def show(request: Request) -> Response:
    """Responds with a model's facts and capabilities, whether it is in memory or not.

    Sends JSON with `details`, `model_info`, `capabilities`, `template`, `modified_at`, and what the name presets
    (`parameters`, `system`).
    """
    state, body = state_of(request), await body_of(request, ModelAsked)
    name = body.said
    source = await state.named(name)
    loaded = state.residency.find(source)
    context = loaded.model.backend.engine.context if loaded else None
    facts = await state.facts(source)
    can = await state.abilities_of(source, facts)
    info = {
        "general.architecture": facts.family,
        f"{facts.family}.context_length": context or facts.context,
        "general.basename": source.name,
        **_of_embeddings(facts),
    }
    about = {"details": _details(facts), "model_info": info, "capabilities": can.capabilities}
    said = {**about, "template": can.template, "modified_at": stamp(facts.made)}
    return json_response({**said, **_preset(await state.preset(name, source))})


def _of_embeddings(facts: ModelFacts) -> dict[str, Any]:
    """Returns what GGUF files say of an embedding model; nothing for one that generates text."""
    if facts.pooling is None:
        return {}
    return {
        f"{facts.family}.embedding_length": facts.hidden,
        f"{facts.family}.pooling_type": POOLING_TYPES[facts.pooling.mode],
    }


def _preset(preset: Preset) -> dict[str, str]:
    """Returns what requests get that ask for nothing else: the system text of the model's name, and its and the
    server's parameters as a Modelfile has them."""
    system = preset.get("system")
    lines = parameter_lines(preset)
    said = {"parameters": "\n".join(lines)} if lines else {}
    return {**said, "system": system} if system else said


def _row(source: ModelSource, facts: ModelFacts, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(facts.made),
        "size": facts.size_bytes,
        "digest": facts.identity,
        "capabilities": [facts.task],
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    family = facts.family
    return {"format": "kt", "family": family, "families": [family], "parent_model": ""}


_LATEST = ":latest"


class PullBody(ModelAsked):
    """A request for a model."""

    stream: bool = True
    insecure: bool = False


class DeleteBody(ModelAsked):
    """A request to remove a model."""


class CopyBody(msgspec.Struct):
    """A request for a further name."""

    source: str = ""
    destination: str = ""


async def pull(request: Request) -> App:
    """Pulls and converts a model; it is cancelled when the client disconnects, and the next pull resumes it.

    Sends lines of JSON with `status` and, if known, `total` and `completed` bytes, or only the last status if `stream`
    is false.
    """
    state, body = state_of(request), await body_of(request, PullBody)
    if body.insecure:
        raise not_supported("insecure")
    pulling = _Pull(_library_editor(request), _named(body.said, "model"))
    if body.stream:
        return StreamingResponse(_told(state, pulling), media_type=LINES)
    try:
        await pulling.end()
    finally:
        pulling.stop()
        state.catalogue.forget()
    return json_response({"status": "success"})


async def delete(request: Request) -> Response:
    """Removes a model, or a further name.

    Sends an empty body.
    """
    state, body = state_of(request), await body_of(request, DeleteBody)
    editor, name = _library_editor(request), _named(body.said, "model")
    used = {state.catalogue.own.key, *(each.source.key for each in state.residency.loaded)}
    await asyncio.to_thread(editor.remove, name, used)
    state.catalogue.forget()
    return Response(media_type="application/json")


async def copy(request: Request) -> Response:
    """Adds another name for a model.

    Sends an empty body.
    """
    state, body = state_of(request), await body_of(request, CopyBody)
    editor = _library_editor(request)
    name, further = _named(body.source, "source"), _named(body.destination, "destination")
    await asyncio.to_thread(editor.name, name, further)
    state.catalogue.forget()
    return Response(media_type="application/json")


async def unsupported(request: Request) -> Response:
    """Raises the error for paths of Ollama that this server does not support.

    Its status is 400 for POST and DELETE, else 404.
    """
    if request.method not in ("POST", "DELETE"):
        raise no_path(request)
    raise Refusal(
        400, f"{request.url.path[:200]} is not supported; use kt convert to create models"
    )


def _library_editor(request: Request) -> LibraryEditor:
    """Returns what changes the library, for a client that may: one with the API key, or the owner.

    Raises:
        Refusal: the client may not.
    """
    state = state_of(request)
    if state.editor is None or not (state.rules.keys or is_owner(request.scope)):
        raise Refusal(
            403,
            "changing the library requires an API key, and this server has none"
            " (start it with kt serve --api-key-file FILE)",
            "",
            "needs_key",
        )
    return state.editor


def _named(name: str, field: str) -> str:
    if not name:
        raise Refusal(400, f"{field} is required", field, "missing")
    return name.removesuffix(_LATEST)


async def _told(state: ServerState, pulling: _Pull) -> AsyncIterator[bytes]:
    """Yields the lines of a pull."""
    try:
        yield _line({"status": "pulling manifest"})
        async for step in pulling.steps():
            yield ALIVE if step is None else _line(_of_step(step))
        await pulling.end()
        yield _line({"status": "success"})
    except Exception as error:
        yield _line({"error": Refusal.of(error).message})
    finally:
        pulling.stop()
        state.catalogue.forget()


class _Pull:
    """A pull on a thread of its own."""

    def __init__(self, editor: LibraryEditor, name: str) -> None:
        loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[PullStep | None] = asyncio.Queue()
        self._stopped = threading.Event()

        def tell(step: PullStep | None) -> None:
            loop.call_soon_threadsafe(self._steps.put_nowait, step)

        def work() -> None:
            try:
                editor.pull(name, tell, self._stopped.is_set)
            finally:
                tell(None)

        thread = Threads(1, "kt-library")  # its own: pulls take hours
        self._work = loop.run_in_executor(thread, work)
        thread.shutdown(wait=False)

    def stop(self) -> None:
        """Asks the pull to stop, if it has not ended."""
        self._stopped.set()
        self._work.add_done_callback(lambda done: done.exception())  # somebody else has told it

    async def end(self) -> None:
        """Waits until the pull has ended.

        Raises:
            KtError: see `LibraryEditor.pull`.
        """
        await asyncio.shield(self._work)

    async def steps(self) -> AsyncIterator[PullStep | None]:
        """Yields the steps of the pull until it has ended; None: nothing has happened for a while."""
        while True:
            try:
                async with asyncio.timeout(ALIVE_S):
                    step = await self._steps.get()
            except TimeoutError:
                yield None
                continue
            if step is None:
                return
            yield step


def _of_step(step: PullStep) -> dict[str, Any]:
    if step.total is None or step.done is None:
        return {"status": step.what}
    return {"status": step.what, "digest": step.what, "total": step.total, "completed": step.done}


def _line(document: dict[str, Any]) -> bytes:
    return encode(document) + b"\n"
