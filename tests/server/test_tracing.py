"""OpenTelemetry traces: what a receiver gets of requests, and that nothing of its packages is there otherwise.

The receiver is an exporter of the SDK's own that keeps spans in memory, and one HTTP server for the way by a command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from server.running import Running, running, scripted, served_by_command
from waits import until

from ktcli.assembly.listener import Listener
from ktcli.server.tracing.provider import naming_variable, tracer_provider
from ktcli.server.tracing.spans import trace_of

SECRET = "the question that stays here"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture(scope="module")
def spans() -> Any:
    """An exporter that keeps spans."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, spans: Any) -> Iterator[Running]:
    """A server whose spans are kept."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    script = lambda prompt: call if "call it" in prompt else "four words of answer"  # noqa: E731
    folder = tmp_path_factory.mktemp("model")
    with running(scripted(folder, script), trace=trace_of(provider)) as found:
        yield found


def post(server: Running, path: str, headers: Any = None, **body: Any) -> requests.Response:
    body.setdefault("messages", [{"role": "user", "content": SECRET}])
    return requests.post(server.url + path, json=body, headers=headers, timeout=60)


def taken(spans: Any, n: int) -> list[Any]:
    """The spans of the latest request; the last one ends behind its answer."""
    until(lambda: len(spans.get_finished_spans()) >= n)
    found = spans.get_finished_spans()
    spans.clear()
    return list(found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_and_its_answer_another_below(
    traced: Running, spans: Any, stream: bool
) -> None:
    answer = post(traced, "/v1/chat/completions", {**PARENT, "X-Request-Id": "mine"}, stream=stream)
    assert answer.status_code == 200
    model, request = taken(spans, 2)
    assert (request.name, model.name) == ("POST /v1/chat/completions", "chat fake")
    assert (request.kind.name, model.kind.name) == ("SERVER", "INTERNAL")
    assert f"{request.parent.span_id:016x}" == SPAN and f"{request.context.trace_id:032x}" == TRACE
    assert model.parent.span_id == request.context.span_id
    assert model.context.trace_id == request.context.trace_id
    said = dict(request.attributes)
    assert said["http.request.method"] == "POST" and said["http.response.status_code"] == 200
    assert said["http.route"] == said["url.path"] == "/v1/chat/completions"
    assert said["http.response.header.x-request-id"] == ("mine",)
    said = dict(model.attributes)
    assert said["gen_ai.usage.output_tokens"] > 0 < said["gen_ai.usage.input_tokens"]
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    first_s = said["gen_ai.response.time_to_first_chunk"]
    assert 0 < first_s <= (model.end_time - model.start_time) / 1e9
    assert request.start_time <= model.start_time <= model.end_time <= request.end_time


def test_spans_keep_their_order_whatever_runs_between_readings_of_two_clocks(
    traced: Running, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the wall's clock is a second less late than the one before."""
    late_s = iter(range(100, 0, -1))
    clock = SimpleNamespace(
        monotonic=time.monotonic,
        monotonic_ns=time.monotonic_ns,
        time_ns=lambda: time.time_ns() + next(late_s) * 10**9,
    )
    monkeypatch.setattr("ktcli.server.tracing.spans.time", clock)
    assert post(traced, "/v1/chat/completions").status_code == 200
    model, request = taken(spans, 2)
    assert request.start_time <= model.start_time <= model.end_time <= request.end_time


def test_counts_are_those_of_the_answer(traced: Running, spans: Any) -> None:
    used = post(traced, "/v1/chat/completions", n=2, max_tokens=3).json()["usage"]
    said = taken(spans, 2)[0].attributes
    assert said["gen_ai.usage.input_tokens"] == used["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == used["completion_tokens"] == 6
    cached = used["prompt_tokens_details"]["cached_tokens"]
    assert said["gen_ai.usage.cache_read.input_tokens"] == cached
    assert said["gen_ai.response.finish_reasons"] == ("length", "length")


@pytest.mark.parametrize(
    ("path", "more", "operation"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}, "text_completion"),
        ("/v1/responses", {"input": SECRET}, "chat"),
        ("/v1/messages", {"max_tokens": 9}, "chat"),
        ("/messages", {"max_tokens": 9}, "chat"),
        ("/api/chat", {"stream": False}, "chat"),
        ("/api/generate", {"prompt": SECRET, "stream": False}, "text_completion"),
    ],
)
def test_every_api_is_traced_without_its_texts(
    traced: Running, spans: Any, path: str, more: dict[str, Any], operation: str
) -> None:
    assert post(traced, path, **more).status_code == 200
    found = taken(spans, 2)
    assert found[0].attributes["gen_ai.operation.name"] == operation
    whole = "".join(each.to_json() for each in found)
    assert SECRET not in whole and "four words" not in whole


def test_a_call_is_a_reason_to_finish(traced: Running, spans: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    ask = [{"role": "user", "content": "call it"}]
    assert post(traced, "/v1/chat/completions", messages=ask, tools=tools).status_code == 200
    assert taken(spans, 2)[0].attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)


def test_refused_and_unknown_requests_are_traced_and_probes_are_not(
    traced: Running, spans: Any
) -> None:
    for path in ("/health", "/metrics", "/server"):
        requests.get(traced.url + path, timeout=60)
    requests.get(f"{traced.url}/none", headers={"traceparent": "\xff-no-trace"}, timeout=60)
    (unknown,) = taken(spans, 1)
    assert unknown.name == "GET" and unknown.parent is None
    assert unknown.attributes["http.response.status_code"] == 404
    post(traced, "/v1/chat/completions", messages=3)
    (refused,) = taken(spans, 1)
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.status.status_code.name == "UNSET"  # the client's fault


def test_a_command_sends_traces_where_the_variables_say(
    monkeypatch: pytest.MonkeyPatch, spans: Any
) -> None:
    trace_service_pb2: Any = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
    )
    got: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            got.append(trace_service_pb2.ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{receiver.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        with served_by_command() as url:
            requests.get(f"{url}/v1/models", timeout=60)
        receiver.shutdown()
    (resource,) = [each for one in got for each in one.resource_spans]
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == "kt" and about["deployment.environment"] == "test"
    assert [each.name for each in resource.scope_spans[0].spans] == ["GET /v1/models"]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "x"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_only_variables_that_name_a_receiver_ask_for_traces(
    variables: dict[str, str], named: str | None
) -> None:
    assert naming_variable(variables) == named


class Heard(Listener):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.warnings.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_a_missing_package_or_exporter_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    for name in [each for each in sys.modules if each.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert tracer_provider(heard, variables) is None
    assert heard.warnings == [
        "OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent: pip install 'ktcli[otel]' installs what sends them"
    ]


def test_an_unknown_exporter_is_a_sentence(spans: Any) -> None:
    heard = Heard()
    assert tracer_provider(heard, {"OTEL_TRACES_EXPORTER": "zipkin"}) is None
    assert "has the exporter 'zipkin'" in heard.warnings[0]


def test_a_receiver_that_fails_is_said_once(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, right = Heard(), threading.Event()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if right.is_set() else 400)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        port = receiver.server_port
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}/v1/traces"
        )
        provider = tracer_provider(heard)
        assert provider is not None
        for _ in range(2):
            for _ in range(2):
                provider.get_tracer("test").start_span("one").end()
                provider.force_flush()
            right.set()
        provider.shutdown()
        receiver.shutdown()
    lost, again = heard.warnings
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in lost and again == "traces are delivered again"


def test_nothing_of_opentelemetry_is_imported_unless_asked_for() -> None:
    code = (
        "import sys; from ktcli.assembly.listener import SILENT; import ktcli.server.process.serving\n"
        "from ktcli.server.tracing.provider import tracing\n"
        "with tracing(SILENT) as trace: assert trace is None\n"
        "print([each for each in sys.modules if 'opentelemetry' in each])"
    )
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environ,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n"
