"""Opens the way of traces to their receiver, as OpenTelemetry's own variables say.

The packages are an extra of kt. Nothing of them is imported unless a variable names a receiver.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ktcli import __version__
from ktcli.assembly.listener import Listener
from ktcli.server.tracing.spans import Trace, trace_of
from ktcli.threads import Daemon, signals_blocked

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# Any of these names a receiver. OpenTelemetry's own default, an address on this machine, is none: packages that are
# installed for something else should not make a server look for one.
_NAMING = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_GROUP = "opentelemetry_traces_exporter"  # the entry points of exporters
# That a server which ends waits for a receiver; OpenTelemetry itself would wait for 30.
_END_S = 3.0
_INSTALL = "pip install 'ktcli[otel]'"


def naming_variable(environ: Mapping[str, str]) -> str | None:
    """Returns the name of the environment variable that asks for traces; None: none does, or another variable turns
    traces off."""
    said = {name: environ.get(name, "").strip() for name in _NAMING}
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or said["OTEL_TRACES_EXPORTER"].lower() == "none":
        return None
    return next((name for name, value in said.items() if value), None)


def tracer_provider(
    listener: Listener, environ: Mapping[str, str] = os.environ
) -> TracerProvider | None:
    """Returns OpenTelemetry's tracer provider with the exporters that the environment variables name; None: they name
    none, or it cannot be created, of which the listener is warned."""
    if (variable := naming_variable(environ)) is None:
        return None
    try:
        return _made(environ, _Delivery(listener, variable))
    except ImportError:
        listener.warn(
            f"{variable} is set, but no traces are sent: {_INSTALL} installs what sends them"
        )
    except Exception as error:  # whatever a package of others makes of its variables
        listener.warn(f"{variable} is set, but no traces are sent: {error}")
    return None


@contextmanager
def tracing(listener: Listener) -> Iterator[Trace | None]:
    """Opens a context that yields a function to trace requests, or None if none are asked for or can be sent. At its
    end, remaining spans are sent, for which it waits at most 3 seconds."""
    if (provider := tracer_provider(listener)) is None:
        yield None
        return
    try:
        yield trace_of(provider)
    finally:
        ending = Daemon(provider.shutdown, name="kt-traces")
        ending.start()
        ending.join(_END_S)


class _Delivery:
    """Tells a listener when traces are no longer delivered, and when they are again: the exporters themselves would
    log each attempt."""

    def __init__(self, listener: Listener, variable: str) -> None:
        self._listener, self._variable, self._fails = listener, variable, False

    def watch(self, exporter: Any) -> Any:
        """Returns an exporter that says so when another one, which does the work, fails."""
        send = exporter.export

        def export(spans: Any) -> Any:
            result = send(spans)
            if (fails := result.name != "SUCCESS") != self._fails:
                self._fails = fails
                self._say()
            return result

        exporter.export = export
        return exporter

    def _say(self) -> None:
        if self._fails:
            said = "traces cannot be delivered, and those of this time are lost"
            self._listener.warn(f"{said}; check the receiver that {self._variable} names")
        else:
            self._listener.note("traces are delivered again")


def _made(environ: Mapping[str, str], delivery: _Delivery) -> TracerProvider:
    """Returns the provider. Raises: ImportError: a package is missing. ValueError: an exporter is unknown."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporters = [delivery.watch(_exporter(name)) for name in _names(environ)]
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # see _Delivery
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "kt", "service.version": __version__}))
    made = TracerProvider(resource=resource, shutdown_on_exit=False)
    with signals_blocked():  # a thread of its own is started
        for each in exporters:
            made.add_span_processor(BatchSpanProcessor(each))
    return made


def _names(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the exporters that the variables ask for, as their packages register them."""
    protocol = next((said for name in _PROTOCOLS if (said := environ.get(name, "").strip())), "")
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    return [otlp if name.strip() == "otlp" else name.strip() for name in asked.split(",")]


def _exporter(name: str) -> Any:
    found = [*metadata.entry_points(group=_GROUP, name=name)]
    if not found and name in ("otlp_proto_http", "console"):
        raise ImportError(name)
    if not found:
        raise ValueError(f"no installed package has the exporter {name[:100]!r}")
    return found[0].load()()
