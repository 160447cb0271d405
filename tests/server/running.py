"""Runs servers in threads, with models that follow a script."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat.fake_engine import END, TEMPLATE, FakeEngine, write_tokenizer
from ports import free_port
from server.sources import ScriptedModel

from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.request import Wanted
from ktcli.dialogue.local import LocalBackend
from ktcli.engine.scheduler import Limits
from ktcli.errors import KtError
from ktcli.server.http.keys import DEFAULT, ApiKeys, NamedKey
from ktcli.server.http.state import Rules
from ktcli.server.models.catalogue import ModelIndex
from ktcli.server.models.residency import Residency
from ktcli.server.models.source import ModelSource
from ktcli.server.process.listening import tcp_socket
from ktcli.server.process.serving import Service, Serving
from ktcli.server.tracing.spans import Trace
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer

Script = Callable[[str], str | list[int]]


@dataclass
class Running:
    """A server that runs.

    Attributes:
        errors: with which it has ended by itself; whoever expects any takes them.
    """

    port: int
    engine: FakeEngine
    serving: Serving | None = None
    errors: list[KtError] = field(default_factory=list)

    @property
    def residency(self) -> Residency:
        """Its models in memory."""
        assert self.serving is not None and self.serving.state is not None
        return self.serving.state.residency

    @property
    def loaded(self) -> list[str]:
        """The names of the models in memory."""
        return [each.model.name for each in self.residency.loaded]

    @property
    def leases(self) -> int:
        """How many use its models."""
        return self.residency.leases

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def scripted(
    folder: Path,
    script: Script,
    context: int = 4096,
    template: str = TEMPLATE,
    more: Sequence[str] = (),
    end: str = END,
    answers: object = None,
) -> LocalBackend:
    """A model that follows a script, and answers eight at once."""
    write_tokenizer(folder, template, more=more, end=end, answers=answers)
    (folder / "generation_config.json").write_text("{}")  # else a quotation mark ends answers
    engine = FakeEngine(load_tokenizer(folder), script, context, streams=8)
    return LocalBackend("fake", engine, read_text_model("fake", folder))  # type: ignore[arg-type]


def one_key(key: str) -> ApiKeys:
    """Returns the only key of a server, without a name."""
    return ApiKeys([NamedKey(DEFAULT, key)])


@contextmanager
def running(
    backend: LocalBackend,
    rules: Rules | None = None,
    limits: Limits | None = None,
    more: Sequence[socket.socket] = (),
    log: Callable[[dict[str, Any]], None] = lambda entry: None,
    trace: Trace | None = None,
) -> Iterator[Running]:
    """Serves a model while the context lasts, at further sockets too."""
    with serving_models(
        [ScriptedModel(backend)], rules, limits, more, log=log, trace=trace
    ) as found:
        yield found


@contextmanager
def serving_models(
    models: Sequence[ModelSource],
    rules: Rules | None = None,
    limits: Limits | None = None,
    more: Sequence[socket.socket] = (),
    *,
    begun: bool = True,
    library: Callable[[], ModelIndex] | None = None,
    log: Callable[[dict[str, Any]], None] = lambda entry: None,
    trace: Trace | None = None,
    listener: Listener = SILENT,
) -> Iterator[Running]:
    """Serves a library of models, the first of which is the server's own, while the context lasts.

    Args:
        begun: whether to wait until the first model is loaded.
        library: reads another library than these models.
    """
    ready = threading.Event()
    listening = tcp_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    sockets = [listening, *more]
    index = ModelIndex(models, {each.name: each for each in models})
    service = Service(
        models[0],
        sockets,
        rules or Rules(),
        library or (lambda: index),
        Wanted(),
        limits or Limits(),
        listener=listener,
        log=log,
        trace=trace,
        ready=ready.set,
    )
    serving = Serving(service)
    own = models[0]
    engine = own.backend.engine if isinstance(own, ScriptedModel) else None
    made = Running(port, engine, serving)  # type: ignore[arg-type]

    def run() -> None:
        try:
            serving.run()
        except KtError as error:
            made.errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert not begun or ready.wait(60)  # seconds, on a machine that others use
        yield made
    finally:
        serving.stop()
        thread.join(60)
        listening.close()
        assert not thread.is_alive()
    assert not made.errors


@contextmanager
def served_by_command(*options: str, program: Sequence[str] = ("-m", "ktcli")) -> Iterator[str]:
    """The address of `kt serve kt-mini` in a process of its own.

    Args:
        program: how the interpreter starts kt.
    """
    port = free_port()
    command = [sys.executable, *program, "serve", "kt-mini", "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        begun = any(line.startswith("serving") for line in process.stderr)
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        try:
            assert begun
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)  # Ctrl-C; other tests end servers by SIGTERM
            reader.join()
            assert process.wait(60) == 0
