"""Runs servers in threads, with models that follow a script."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chat.fake_engine import END, TEMPLATE, FakeEngine, write_tokenizer

from ktcli.chat.speaker import Speaker, read_voice
from ktcli.chat.tokenizer import load_tokenizer
from ktcli.engine.scheduler import Limits
from ktcli.server.house import Rules
from ktcli.server.listening import tcp_socket
from ktcli.server.serving import Service, Serving

Script = Callable[[str], str | list[int]]


@dataclass
class Running:
    """A server that runs."""

    port: int
    engine: FakeEngine
    serving: Serving | None = None

    @property
    def leases(self) -> int:
        """How many use its models."""
        assert self.serving is not None and self.serving.house is not None
        return self.serving.house.residency.leases

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
) -> Speaker:
    """A model that follows a script, and answers eight at once."""
    write_tokenizer(folder, template, more=more, end=end)
    (folder / "generation_config.json").write_text("{}")  # else a quotation mark ends answers
    engine = FakeEngine(load_tokenizer(folder), script, context, streams=8)
    return Speaker("fake", engine, read_voice("fake", folder))  # type: ignore[arg-type]


@contextmanager
def running(
    speaker: Speaker,
    rules: Rules | None = None,
    limits: Limits | None = None,
    more: Sequence[socket.socket] = (),
) -> Iterator[Running]:
    """Serves a model while the context lasts, at further sockets too."""
    ready = threading.Event()
    listening = tcp_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    sockets = [listening, *more]
    service = Service(speaker, sockets, rules or Rules(), limits or Limits(), ready=ready.set)
    serving = Serving(service)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        assert ready.wait(10)
        yield Running(port, speaker.engine, serving)  # type: ignore[arg-type]
    finally:
        serving.stop()
        thread.join(20)
        listening.close()
        assert not thread.is_alive()
