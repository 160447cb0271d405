"""Who may ask a server: this machine's own names however they are spelled, and what its owner lets in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from server.running import Running, one_key, running, scripted
from waits import until

from ktcli.commands.serve.access import access_rules
from ktcli.errors import UsageError
from ktcli.server.http.access import LOOPBACK, allowed_host, allowed_origin, host_name, is_loopback
from ktcli.server.http.keys import ApiKeys
from ktcli.server.http.state import Rules

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
APP, PAGE = "app://obsidian.md", "http://localhost:3000"
LOGGED: list[dict[str, Any]] = []


@pytest.mark.parametrize(
    "host",
    "localhost LOCALHOST:80 localhost. 127.0.0.1 127.0.0.2:1 127.1 0x7f000001 [::1]:80 [0:0:0:0:0:0:0:1] "
    "[::ffff:127.0.0.1]".split(),
)
def test_each_spelling_of_loopback_is_this_machine(host: str) -> None:
    assert is_loopback(host_name(host) or "")


@pytest.mark.parametrize(
    "host",
    "evil.example 0.0.0.0 128.0.0.1 127.evil.example localhost.evil.example 127.0.0.1.evil.example "
    "[::2] 10.1 1.2.3.4.5 x".split(),
)
def test_other_names_are_not(host: str) -> None:
    assert not is_loopback(host_name(host) or "")
    assert not is_loopback("")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    rules = Rules(one_key("secret"), LOOPBACK | {"ai.example.com"}, frozenset({APP, PAGE}))
    model = scripted(tmp_path_factory.mktemp("model"), lambda question: "yes")
    with running(model, rules, log=LOGGED.append) as found:
        yield found


KEY = {"Authorization": "Bearer secret"}


def asked(server: Running, **headers: str) -> requests.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(server.url + CHAT, json=BODY, headers={**KEY, **named}, timeout=60)


@pytest.mark.parametrize("origin", [APP, PAGE])
def test_a_page_that_is_let_in_asks_first_and_reads_the_answer(
    server: Running, origin: str
) -> None:
    wanted = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    before = requests.options(server.url + CHAT, headers=wanted, timeout=60)  # without a key
    assert before.status_code == 200 and "POST" in before.headers["Access-Control-Allow-Methods"]
    assert before.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    answer = asked(server, Origin=origin, Sec_Fetch_Site="cross-site")
    refused = asked(server, Origin=origin, Authorization="Bearer no")
    assert (answer.status_code, refused.status_code) == (200, 401)
    for each in (before, answer, refused):
        assert each.headers["Access-Control-Allow-Origin"] == origin
        assert each.headers["Vary"] == "Origin"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", f"{PAGE}0", "http://localhost"])
def test_other_pages_stay_out(server: Running, origin: str) -> None:
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for answer in (asked(server, Origin=origin), requests.options(server.url + CHAT, headers=ask)):
        assert answer.status_code == 403
        assert not any(name.startswith("Access-Control") for name in answer.headers)
    assert "--allow-origin" in asked(server, Origin=origin).json()["error"]["message"]


def test_a_name_that_is_let_in_still_needs_the_key(server: Running) -> None:
    assert asked(server, Host="AI.example.com:443").ok
    assert asked(server, Host="ai.example.com", Authorization="").status_code == 401
    refused = asked(server, Host="host.docker.internal")
    assert refused.status_code == 403 and "--allow-host" in refused.json()["error"]["message"]


def test_the_id_of_a_client_is_that_of_its_request(server: Running) -> None:
    LOGGED.clear()
    assert asked(server, X_Request_Id="abc-123").headers["X-Request-Id"] == "abc-123"
    until(lambda: "abc-123" in [each["request_id"] for each in LOGGED])  # once it was sent
    for other in ("x" * 129, "a b", "caf\u00e9"):
        assert asked(server, X_Request_Id=other).headers["X-Request-Id"] not in ("", other)
    plain = requests.get(f"{server.url}/v1/models", headers=KEY, timeout=60)
    until(lambda: plain.headers["X-Request-Id"] == LOGGED[-1]["request_id"])
    made = asked(server)
    assert made.json()["id"].endswith(made.headers["X-Request-Id"])


def test_nothing_is_let_in_by_default() -> None:
    rules = access_rules("127.0.0.1", 80, ApiKeys(), (), (), "--host")
    assert (rules.hosts, rules.origins) == (LOOPBACK, frozenset())
    assert access_rules("127.0.0.2", 80, ApiKeys(), (), (), "--host").hosts == LOOPBACK
    assert access_rules("0.0.0.0", 80, "k", (), (), "--host").hosts == frozenset()  # the key tells
    assert access_rules("localhost", 80, "k", ["*"], ["*"], "--host").hosts == frozenset()


def test_everybody_is_let_in_with_a_key_only() -> None:
    for names, origins in ((["*"], []), ([], ["*"]), ([], ["null"])):
        assert access_rules("127.0.0.1", 80, "key", names, origins, "--host")
        with pytest.raises(UsageError, match="needs an API key"):
            access_rules("127.0.0.1", 80, ApiKeys(), names, origins, "--host")


def test_what_is_let_in_is_read_as_browsers_write_it() -> None:
    assert allowed_host("AI.Example.com:8080", has_key=False) == "ai.example.com"
    assert allowed_host("fd00::1", has_key=False) == "fd00::1"
    assert allowed_origin("HTTPS://Chat.example.com/", has_key=False) == "https://chat.example.com"
    assert allowed_origin("https://a:443", has_key=False) == "https://a"  # as browsers write them
    assert allowed_origin("http://[::1]:80/", has_key=False) == "http://[::1]"
    assert allowed_origin("https://a:80", has_key=False) == "https://a:80"
    others = "https://a/b chat.example.com https:// https://*.a NULL https://a: https://a:99999 https://a:x https://[zz]"
    for said in (*others.split(), "https://a b", "", "https://b\u00fccher.example"):
        with pytest.raises(UsageError, match="is not an origin"):
            allowed_origin(said, has_key=True)
    for said in ("a/b", "", "a b", "https://a", "*.a", "a:99999", "b\u00fccher.example"):
        with pytest.raises(UsageError, match="is not a host name"):
            allowed_host(said, has_key=True)
