"""`kt bench serve`: what is sent and counted, and how it says that a server is of no use. Never how fast one is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
import requests
from server.running import Running, one_key, running, scripted

from ktcli.main import main
from ktcli.server.http.state import Rules

Capture = pytest.CaptureFixture[str]
BLOCK = """\
============ Serving Benchmark Result ============
Backend: openai-chat
Traffic request rate: inf
Max request concurrency: 3
Successful requests: 6
Benchmark duration (s): #
Total input tokens: #
Total input text tokens: #
Total input vision tokens: 0
Total generated tokens: 60
Total generated tokens (retokenized): #
Request throughput (req/s): #
Input token throughput (tok/s): #
Output token throughput (tok/s): #
Total token throughput (tok/s): #
Concurrency: #
----------------End-to-End Latency----------------
Mean E2E Latency (ms): #
Median E2E Latency (ms): #
---------------Time to First Token----------------
Mean TTFT (ms): #
Median TTFT (ms): #
P99 TTFT (ms): #
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms): #
Median TPOT (ms): #
P99 TPOT (ms): #
---------------Inter-Token Latency----------------
Mean ITL (ms): #
Median ITL (ms): #
P95 ITL (ms): #
P99 ITL (ms): #
Max ITL (ms): #
==================================================
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    backend = scripted(tmp_path_factory.mktemp("model"), lambda question: "word " * 5)
    with running(backend, Rules(one_key("secret"))) as found:
        yield found


def bench(server: Running, *more: str) -> int:
    sized = (
        "--num-prompts",
        "6",
        "--max-concurrency",
        "3",
        "--output-len",
        "10",
        "--input-len",
        "50",
    )
    return main(
        ["bench", "serve", "--url", f"{server.url}/v1", "--api-key", "secret", *sized, *more]
    )


def test_the_block_has_the_lines_that_people_know(server: Running, capsys: Capture) -> None:
    assert bench(server) == 0
    said = capsys.readouterr().out.splitlines()
    for line, wanted in zip(said, BLOCK.splitlines(), strict=True):
        name, _, value = wanted.partition(": ")
        assert line.startswith(name)
        if value:
            assert line[:40].rstrip() == f"{name}:"
            assert line[41:].strip() == value if value != "#" else float(line[41:]) > 0


def test_what_is_found_agrees_with_itself_and_with_the_server(
    server: Running, capsys: Capture, tmp_path: Path
) -> None:
    before = _generated(server)
    files = tmp_path / "requests.jsonl", tmp_path / "plot.svg"
    wishes = ("--request-rate", "500", "--output-file", str(files[0]), "--plot", str(files[1]))
    assert bench(server, "--json", "--seed", "7", *wishes) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [row["output_tokens"] for row in rows] == [10] * 6 and found["failed"] == 0
    assert _generated(server) - before == found["total_output_tokens"] + 2  # two that are measures
    assert found["total_input_tokens"] == sum(row["input_tokens"] for row in rows)
    assert all(abs(row["input_tokens"] - 50) <= 15 for row in rows)  # its tokenizer knows few words
    seconds = found["duration"]
    assert found["output_throughput"] == pytest.approx(60 / seconds)
    total = sum(row["latency_s"] for row in rows)
    assert found["concurrency"] == pytest.approx(total / seconds) and found["concurrency"] <= 3
    for row in rows:
        assert row["latency_s"] == pytest.approx(row["ttft_s"] + sum(row["itl_s"]))
    lines = ElementTree.parse(files[1]).iter("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [101, 101]


def _generated(server: Running) -> int:
    said = requests.get(
        f"{server.url}/metrics", headers={"authorization": "Bearer secret"}, timeout=60
    ).text
    return int(float(said.partition("\nkt_generation_tokens_total ")[2].partition("\n")[0] or 0))


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[QuietHandler]) -> Iterator[str]:
    """A server that answers with a handler; its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


# --- behind a router ----------------------------------------------------------------------------------


@pytest.fixture
def router() -> Iterator[str]:
    """A router that sends every third request to one of its servers, and the others to the other."""
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    said = [
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 4}}},
    ]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in said) + "data: [DONE]\n\n"
    seen: list[int] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(1)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            name = "http://b:1" if len(seen) % 3 == 0 else "http://a:1\x1b[31m"
            self.send_header("x-smg-routed-worker-id", name)
            self.end_headers()
            self.wfile.write(body.encode())

    with serving(Handler) as url:
        yield url


def test_each_server_behind_a_router_has_its_figures(router: str, capsys: Capture) -> None:
    words = ["bench", "serve", "--url", router, "--model", "x", "--max-concurrency", "1"]
    words += ["--num-prompts", "9"]
    assert main([*words, "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["servers"]
    assert other["server"] == "http://b:1" and one["server"].startswith("http://a:1")
    assert (one["requests"], other["requests"]) == (6, 3)
    assert other["share"] == pytest.approx(1 / 3) and other["failed"] == 0
    assert (other["input_tokens"], other["cached_tokens"], other["output_tokens"]) == (30, 12, 3)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "http://b:1" in shown and "40%" in shown and "\x1b[31m" not in shown


# --- servers of no use --------------------------------------------------------------------------------

EVENT = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
ANSWERS = {
    "none": ("text/html", "<p>hello</p>", "responded with text/html, not with an event stream"),
    "unknown": ("404", '{"error": {"message": "the model x is unknown"}}', "the model x is unknown"),
    "word": ("500", "oh", "it responded with status 500"),
    "cut": ("text/event-stream", EVENT, "the stream ended before the answer did"),
    "error": (
        "text/event-stream", EVENT + 'data: {"error": {"message": "no memory"}}\n\n', "no memory",
    ),
    "junk": ("text/event-stream", "data: [1, 2\n\n", "a line that is not an event"),
    "endless": ("text/event-stream", ": still here\n" * 9000, "more than 64 KiB in one answer"),
    "deep": ("text/event-stream", f"data: {'[' * 100_000}\n\n", "a line that is not an event"),
}  # fmt: skip


@pytest.fixture(scope="module")
def useless() -> Iterator[str]:
    class Handler(QuietHandler):
        def do_POST(self) -> None:
            name = self.path.split("/")[1]
            self.rfile.read(int(self.headers["content-length"]))
            kind, body, _ = ANSWERS[name]
            self.send_response(int(kind) if kind.isdigit() else 200)
            self.send_header("Content-Type", "application/json" if kind.isdigit() else kind)
            self.end_headers()
            self.wfile.write(body.encode())

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("name", ANSWERS)
def test_a_server_that_does_not_answer_is_told_in_one_sentence(
    useless: str, name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "endless":
        monkeypatch.setattr("ktcli.measure.endpoint._STREAM_BYTES", 64 << 10)
    assert main(["bench", "serve", "--url", f"{useless}/{name}", "--model", "x"]) == 1
    said = capsys.readouterr()
    assert ANSWERS[name][2] in said.err and not said.out


def test_who_cannot_be_asked_is_told_before_anything_is_sent(
    server: Running, capsys: Capture
) -> None:
    for arguments, code, said in (
        (["--url", "localhost:8000"], 2, "not a server address"),
        (["--url", "http://me:secret@127.0.0.1:1"], 2, "contains a user name or a password"),
        (["--url", "http://127.0.0.1:1"], 6, "no response from http://127.0.0.1:1"),
        (["--url", server.url], 2, "needs an API key"),
        (["--url", server.url, "--api-key", "wrong"], 2, "rejected the API key"),
    ):
        assert main(["bench", "serve", *arguments]) == code
        assert said in capsys.readouterr().err
