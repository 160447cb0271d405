"""The largest request that each endpoint takes costs other clients little: of the thread that makes prompts, which is
there for all of them, and of the memory. Costs are processor time of that thread and bytes, never the clock's time."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from chat.fake_engine import TEMPLATE
from server.embedding import NAME, stored
from server.running import Running, scripted, serving_models
from server.sources import ScriptedModel
from starlette.routing import Route
from waits import until

from ktcli.server.http import guard
from ktcli.server.http.app import application
from ktcli.server.http.inputsize import MESSAGE_WORK, VALUE_WORK, work_most
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.residency import give_back_memory

CONTEXT = 65_536  # the most that a server has without being asked for more
THREAD_S, MEMORY_BYTES = 0.5, 100 << 20
TOOLS = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
MOST = guard.BODY_BYTES - 1000
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, OLLAMA_TEXT = "/v1/messages", "/api/chat", "/api/generate"
EMBEDDINGS, EMBED, EMBEDDING = "/v1/embeddings", "/api/embed", "/api/embeddings"
EMBEDDED = 4096  # the context of the model that makes embeddings: it computes what it takes
ASKED = [{"role": "user", "content": "hi"}]
IN_CHAT: dict[str, Any] = {"messages": ASKED}
REST: dict[str, dict[str, Any]] = {
    CHAT: IN_CHAT,
    f"{CHAT}/render": IN_CHAT,
    f"{CHAT}/input_tokens": IN_CHAT,
    "/apply-template": IN_CHAT,
    TEXT: {"prompt": "hi"},
    RESPONSE: {"input": ASKED},
    f"{RESPONSE}/input_tokens": {"input": ASKED},
    MESSAGES: {**IN_CHAT, "max_tokens": 9},
    f"{MESSAGES}/count_tokens": IN_CHAT,
    OLLAMA: {**IN_CHAT, "stream": False},
    OLLAMA_TEXT: {"prompt": "hi", "stream": False},
    "/api/show": {},
    "/tokenize": {},
    "/detokenize": {"tokens": []},
    EMBEDDINGS: {"model": NAME, "input": "hi"},
    EMBED: {"model": NAME, "input": "hi"},
    EMBEDDING: {"model": NAME, "prompt": "hi"},
}
# Paths whose bodies do not reach the thread that makes prompts, or that only the server's owner may ask.
ASIDE = re.compile(r"/engine.*|/server/drain|/api/(pull|delete|copy)|/cancel/.*|/v1/responses/{id}")


class Fill(NamedTuple):
    """What a field is filled with: `item` again and again, within `around`."""

    name: str
    around: str
    item: str

    def of(self, size: int) -> str:
        count = (size - len(self.around)) // (len(self.item.encode()) + 1)
        return self.around.replace("*", ",".join([self.item] * count))


def texts(field: str, size: int = MOST) -> list[Fill]:
    """A text of so many bytes, of letters that cost most in one place or another."""
    letters = {
        "letters": "x ",
        "blanks": " ",
        "words": "<|end|>",
        "beginnings": "<",
        "thoughts": "<think>",
        "wide": "\U0001f600a",
    }
    return [Fill(f"{field} of {name}", f'"{each * (size // len(each.encode()))}"', "")
            for name, each in letters.items()]  # fmt: skip


MESSAGE = '{"role":"user","content":""}'
CALL = (
    '{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":'
    '{"name":"f","arguments":"[[],[],[],[]]"}}]}'
)
ARGUMENTS = CALL.replace("[[],[],[],[]]", "[" + "[]," * 4_000_000 + "[]]")
TOOL = '{"type":"function","function":{"name":"f","parameters":{"properties":{*}}}}'
PART = '{"type":"text","text":""}'
KEYS = ",".join(f'"k{at}":""' for at in range(1_000_000))
VALUES = ("[]", "{}", '"ab"', "7", '{"a":1}')


def fills(path: str) -> Iterator[tuple[str, str, str]]:
    """The name, the field and the JSON of each way to fill the requests of a path."""

    def row(field: str, value: Fill) -> tuple[str, str, str]:
        return value.name, field, value.of(MOST)

    for value in VALUES if path in (CHAT, "/detokenize") else VALUES[:1]:
        yield row("x", Fill(f"{value} again and again", "[*]", value))
    if "messages" in REST[path] or path.startswith(RESPONSE):
        yield from conversations(path)
    if path in (CHAT, RESPONSE):
        for name, value in (("keys", f"{{{KEYS}}}"), ("items", f'{{"a":[{"0," * 7_000_000}0]}}')):
            yield f"kwargs: {name}", "chat_template_kwargs", value
        yield "kwargs: text", "chat_template_kwargs", f'{{"a":{texts("")[2].around}}}'
    if path in (CHAT, TEXT, RESPONSE):
        biases = ",".join(f'"{at}":1' for at in range(1_000_000))
        yield "biases", "logit_bias", f"{{{biases}}}"
        yield row("stop", Fill("stops", "[*]", '"ab"'))
    if path == RESPONSE:
        yield "metadata", "metadata", f"{{{KEYS}}}"
        yield from (("instructions", "instructions", fill.around) for fill in texts("")[2:3])
        yield row("input", Fill("references", "[*]", '{"type":"item_reference","id":"rs_a_0"}'))
        yield row("input", Fill("items of no use", "[*]", '{"type":"web_search_call","id":"a"}'))
        useless, long = ',{"type":"x"}' * 250_000, texts("", MOST - 1000)[5].around
        yield "items to keep", "input", f"[{MESSAGE}{useless}]"
        yield "a text to keep", "input", f'[{MESSAGE},{{"type":"x","a":{long}}}]'
        for name in ("previous_response_id", "prompt_cache_key", "safety_identifier"):
            yield name, name, texts("")[0].around
        sealed = f'"kt1.{"A" * (MOST - 1000)}"'
        yield "sealed", "input", f'[{{"type":"reasoning","encrypted_content":{sealed}}}]'
    if path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        yield from (("system", "system", fill.around) for fill in texts("")[2:3])
    if path in (TEXT, OLLAMA_TEXT, "/tokenize"):
        yield from ((fill.name, "prompt", fill.around) for fill in texts("prompt")[::2])
    if path == TEXT:
        yield "ids", "prompt", f"[{'300,' * 1_000_000}7]"
    if path == "/detokenize":
        yield "ids", "tokens", f"[{'300,' * 1_000_000}7]"
        yield "ids that fit", "tokens", f"[{'300,' * (CONTEXT - 1)}7]"
    if path == "/api/show":
        yield "name", "model", texts("")[0].around
    if path in (EMBEDDINGS, EMBED, EMBEDDING):
        yield from of_embeddings(path)


def of_embeddings(path: str) -> Iterator[tuple[str, str, str]]:
    """As `fills`, for what requests for embeddings have."""
    field = "prompt" if path == EMBEDDING else "input"
    looked_at = [*texts("few", 4 * EMBEDDED - 99), *texts("many", 62 * EMBEDDED)]
    for fill in [*texts("x"), *looked_at]:
        yield fill.name, field, fill.around
    yield "texts", field, Fill("texts", "[*]", '"ab"').of(MOST)
    for n, size in ((2048, 900), (120, 16_000)):
        for fill in texts("some", size):
            yield f"{n} texts: {fill.name}", field, f"[{','.join([fill.around] * n)}]"
    if path == EMBEDDINGS:
        yield "ids", field, f"[{'300,' * 1_000_000}7]"
        few = f"[{'300,' * 145}7]"
        yield "lists of ids", field, f"[{','.join([few] * 2048)}]"
        yield "many lists of ids", field, f"[{','.join(['[7]'] * 1_000_000)}]"


def conversations(path: str) -> Iterator[tuple[str, str, str]]:
    """As `fills`, for what conversations have."""
    field = "input" if path.startswith(RESPONSE) else "messages"
    for each in (MESSAGE, CALL.replace('"tool_calls"', '"content":"","tool_calls"')):
        yield "messages", field, Fill("messages", "[*]", each).of(MOST)
        work = MESSAGE_WORK + each.count(":") * VALUE_WORK * (each is not MESSAGE)
        few = ",".join([each] * (work_most(CONTEXT) // work))
        yield "messages that are read", field, f"[{few}]"
    parts = Fill("parts", '[{"role":"user","content":[*]}]', PART)
    yield "parts", field, parts.of(MOST)
    looked_at = [*texts("few", 4 * CONTEXT - 99), *texts("many", 62 * CONTEXT)]
    for fill in [*texts("x"), *looked_at] if path == CHAT else texts("x")[2:3]:
        yield f"content: {fill.name}", field, f'[{{"role":"user","content":{fill.around}}}]'
        yield (
            f"answer: {fill.name}",
            field,
            f'[{{"role":"assistant","content":{fill.around}}},{MESSAGE}]',
        )
    yield "arguments", field, f"[{ARGUMENTS},{MESSAGE}]"
    properties = ",".join(f'"k{at}":{{"type":"string"}}' for at in range(300_000))
    yield "tools", "tools", f"[{TOOL.replace('*', properties)}]"
    few = f"{properties[: 24 * (work_most(CONTEXT) // (3 * VALUE_WORK))]}"
    few_properties = few[: few.rindex(",")]
    yield "tools that are read", "tools", f"[{TOOL.replace('*', few_properties)}]"


def body_with(path: str, field: str, value: str) -> bytes:
    """The body of a request in which one field has a JSON value."""
    rest = {key: each for key, each in REST[path].items() if key != field}
    head = json.dumps(rest)[1:-1]
    return f'{{{head}{", " if head else ""}"{field}":{value}}}'.encode()


class Spent:
    """The processor time of jobs of the thread that makes prompts, one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        ask = Jobs.ask

        def timed(jobs: Jobs, work: Callable[[], Any]) -> Future[Any]:
            def measured() -> Any:
                began = time.thread_time()
                try:
                    return work()
                finally:
                    self.seconds.append(time.thread_time() - began)

            return ask(jobs, measured)

        patch.setattr(Jobs, "ask", timed)


def memory_bytes(name: str) -> int:
    """What this process has in memory (VmRSS), or had at most (VmHWM) since `forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def posted(server: Running, path: str, data: bytes) -> bytes:
    """The answer to a body, which is sent without a copy of it."""
    head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(60)
        client.sendall(head.encode())
        client.sendall(data)
        found = b""
        while more := client.recv(1 << 16):
            found += more
    return found


@pytest.fixture(scope="module")
def spent() -> Iterator[Spent]:
    with pytest.MonkeyPatch.context() as patch:
        yield Spent(patch)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, spent: Spent) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    model = scripted(folder, lambda question: "yes", CONTEXT, template=TOOLS + TEMPLATE)
    longer = {"max_position_embeddings": EMBEDDED}
    embedder, _ = stored(tmp_path_factory.mktemp("embedder"), context=EMBEDDED, config=longer)
    with serving_models([ScriptedModel(model), embedder]) as found:
        for path in (CHAT, EMBEDDINGS):  # what is made once is made
            posted(found, path, json.dumps(REST[path]).encode())
        yield found


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("fourth", range(4))
@pytest.mark.parametrize("path", REST)
def test_the_largest_requests_cost_others_little(
    server: Running, spent: Spent, path: str, fourth: int
) -> None:
    dear = []
    for at, (name, field, value) in enumerate(fills(path)):
        if at % 4 != fourth:
            continue
        data = body_with(path, field, value)
        if len(data) > guard.BODY_BYTES:
            continue
        del spent.seconds[:], value
        give_back_memory()
        forget_peak()
        before = memory_bytes("VmRSS")
        with ThreadPoolExecutor(1) as clients:
            answered = clients.submit(posted, server, path, data)
            other = requests.post(server.url + CHAT, json=IN_CHAT, timeout=60)  # another client
            answer = answered.result()
        assert other.ok and answer.startswith(b"HTTP/1.1 ") and b" 500 " not in answer[:15], (
            name,
            answer[:300],
        )
        seconds, peak = max(spent.seconds), memory_bytes("VmHWM") - before
        if seconds > THREAD_S or peak > MEMORY_BYTES:
            dear.append(f"{name}: {seconds:.2f} s, {peak >> 20} MiB: {answer[-200:]!r}")
    assert not dear


def test_every_path_that_takes_a_body_is_among_them(server: Running) -> None:
    assert server.serving is not None and server.serving.state is not None
    app: Any = application(server.serving.state)
    routes = [each for each in app._app.routes if isinstance(each, Route)]
    paths = {each.path for each in routes if (each.methods or set()) & {"POST", "DELETE"}}
    left = {path for path in paths if "{other" not in path and not ASIDE.fullmatch(path)}
    assert left == set(REST)


QUICK = [
    (CHAT, "messages", "[" + ",".join([MESSAGE] * (work_most(CONTEXT) // MESSAGE_WORK + 1)) + "]"),
    (CHAT, "chat_template_kwargs", '{"a":[' + "0," * 6000 + "0]}"),
    (CHAT, "messages", f'[{{"role":"user","content":"{"x" * (65 * CONTEXT)}"}}]'),
    (MESSAGES, "system", f'"{"<|end|>" * 12_000}"'),
    ("/tokenize", "prompt", f'"{"x" * (65 * CONTEXT)}"'),
    ("/detokenize", "tokens", f"[{'7,' * CONTEXT}7]"),
    (TEXT, "prompt", f"[{'7,' * CONTEXT}7]"),
]

QUICK_NAMES = [
    "many messages",
    "many values",
    "long message",
    "control words",
    "long text",
    "many tokens",
    "many ids",
]


@pytest.mark.parametrize("path,field,value", QUICK, ids=QUICK_NAMES)
def test_what_can_be_no_prompt_is_refused_before_it_is_rendered(
    server: Running, spent: Spent, path: str, field: str, value: str
) -> None:
    del spent.seconds[:]
    answer = posted(server, path, body_with(path, field, value))
    assert answer.startswith(b"HTTP/1.1 400"), answer[:300]
    assert sum(spent.seconds) < 0.1


def test_what_a_client_asked_that_has_left_is_not_done(server: Running, spent: Spent) -> None:
    assert server.serving is not None and server.serving.state is not None
    gate = threading.Event()
    del spent.seconds[:]
    waits = server.serving.state.jobs.ask(gate.wait)
    data = body_with("/tokenize", "prompt", '"hi"')
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + data)
        until(lambda: server.leases == 1)
    until(lambda: server.leases == 0)
    gate.set()
    assert waits.result(60)
    assert server.serving.state.jobs.ask(lambda: True).result(60)
    assert len(spent.seconds) == 2  # the two that were asked for here
