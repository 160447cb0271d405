"""What follows from the facts of servers: a table of cases; and which servers belong together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktcli.errors import KtError, UsageError
from ktcli.server.router.address import address_of, require_different
from ktcli.server.router.counters import counters_in, mean, ratio
from ktcli.server.router.plan import (
    RouterKeys,
    RouterPlace,
    ServerFacts,
    arguments,
    plan_for,
    require_agreement,
)
from ktcli.server.router.smg import Worker, here
from ktcli.server.router.supervision import HealthLog

ONE = ServerFacts("http://a:1", "m", 2048, 4)
# facts beside those of ONE -> threshold, spill, seconds of a request
CASES = {
    "nothing learned": ({}, 0.1, 1, 1800),
    "a common text": ({"common": 0.4}, 0.5, 1, 1800),
    "most is common": ({"common": 0.95}, 0.8, 1, 1800),
    "nothing is common": ({"common": 0.0}, 0.1, 1, 1800),
    "many streams": ({"streams": 64}, 0.1, 16, 1800),
    "one stream": ({"streams": 1}, 0.1, 1, 1800),
    "streams unknown": ({"streams": None}, 0.1, 1, 1800),
    "slow": ({"context": 32768, "token_s": 0.1}, 0.1, 1, 13108),
    "slower than a day": ({"context": 1 << 20, "token_s": 1.0}, 0.1, 1, 86400),
    "context unknown": ({"context": None, "token_s": 1.0}, 0.1, 1, 1800),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_follow_from_facts(case: str) -> None:
    facts, threshold, spill, timeout_s = CASES[case]
    plan = plan_for([replace(ONE, **facts)])  # type: ignore[arg-type]
    assert (plan.threshold, plan.spill, plan.timeout_s) == (threshold, spill, timeout_s)
    assert plan.why


def test_of_several_servers_the_one_counts_that_needs_more() -> None:
    servers = [replace(ONE, common=0.2, streams=16), replace(ONE, common=0.5, token_s=2.0)]
    plan = plan_for(servers)
    assert (plan.threshold, plan.spill, plan.timeout_s) == (0.6, 1, 16384)


PLACE = RouterPlace("127.0.0.1", 8000, 8001, drain_s=30)


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_a_command_line_has_every_number() -> None:
    keys = RouterKeys((("default", "U1"), ("bob", "U2")), "C")
    words = arguments(["http://a:1", "http://b:1"], plan_for([ONE]), PLACE, keys)
    assert words[:4] == ["launch", "--worker-urls", "http://a:1", "http://b:1"]
    assert value(words, "--host") == "127.0.0.1" and value(words, "--port") == "8000"
    assert value(words, "--prometheus-host") == "127.0.0.1"
    assert value(words, "--prometheus-port") == "8001"
    assert value(words, "--shutdown-grace-period-secs") == "30"
    assert value(words, "--health-check-interval-secs") == "2"
    assert value(words, "--cb-timeout-duration-secs") == "5"
    assert value(words, "--api-key") == "U1" and value(words, "--tenant-api-key") == "bob:U2"
    assert value(words, "--control-plane-api-keys") == "kt:kt:admin:C"
    assert "--api-key" not in arguments(["http://a:1"], plan_for([ONE]), PLACE, RouterKeys((), "C"))


def test_a_key_that_begins_with_a_dash_is_no_option() -> None:
    keys = RouterKeys((("default", "-U1"), ("-bob", "-U2")), "-C")
    words = arguments(["http://a:1"], plan_for([ONE]), PLACE, keys)
    assert {"--api-key=-U1", "--tenant-api-key=-bob:-U2"} <= set(words)
    assert value(words, "--control-plane-api-keys") == "kt:kt:admin:-C"


def test_keys_are_hidden_where_they_are_shown() -> None:
    keys = RouterKeys((("default", "SECRET-U"),), "SECRET-C")
    words = arguments(["http://a:1"], plan_for([ONE]), PLACE, keys.hidden())
    assert "SECRET" not in " ".join(words) and "SECRET" not in repr(keys)


def test_metrics_stay_on_loopback_wherever_it_listens() -> None:
    words = arguments(["http://a:1"], plan_for([ONE]), replace(PLACE, host="0.0.0.0"), RouterKeys())
    assert value(words, "--host") == "0.0.0.0"
    assert value(words, "--prometheus-host") == "127.0.0.1"


# --- which belong together ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(ONE, url="http://b:1", model="n"), "http://a:1 serves m, and http://b:1 serves n"),
        (replace(ONE, url="http://b:1", context=4096), "2,048 tokens, and http://b:1 of 4,096"),
    ],
)
def test_servers_that_differ_are_refused_by_name(other: ServerFacts, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        require_agreement([ONE, other])
    assert caught.value.hint


def test_a_server_that_does_not_say_its_context_agrees() -> None:
    require_agreement([replace(ONE, context=None), ONE, replace(ONE, streams=9)])


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("http://10.0.0.2:11435", "http://10.0.0.2:11435"),
        ("http://box", "http://box"),
        ("https://box/", "https://box"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_is_read(said: str, url: str) -> None:
    assert address_of(said).url == url


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("10.0.0.2:11435", "is not the address of a server"),
        ("ftp://box", "is not the address of a server"),
        ("http://", "is not the address of a server"),
        ("http://box:99999", "is not the address of a server"),
        ("http://[::1", "is not the address of a server"),
        ("http://bo\x1bx", "is not the address of a server"),
        ("http://box:0", "is not the address of a server"),
        (f"http://{'a' * 64}.com", "is not the address of a server"),
        ("http://a..com", "is not the address of a server"),
        ("http://box:1/v1", "after the host"),
        ("http://box:1?x=1", "after the host"),
        ("http://me:secret@box:1", "contains a user name or a password"),
        ("", "is not the address of a server"),
    ],
)
def test_what_is_not_an_address_is_said(said: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        address_of(said)
    assert "secret" not in f"{caught.value} {caught.value.hint}"
    assert caught.value.hint


def test_a_server_is_not_there_twice() -> None:
    require_different([address_of("http://127.0.0.1:1"), address_of("http://127.0.0.1:2")])
    for other in (
        "http://127.0.0.1:1/",
        "http://localhost:1",
        "HTTP://LOCALHOST:1",
        "http://127.1:1",
        "http://[::ffff:127.0.0.1]:1",
        "http://0.0.0.0:1",
    ):
        with pytest.raises(KtError, match="was given twice"):
            require_different([address_of("http://127.0.0.1:1"), address_of(other)])


def test_this_machine_reaches_a_router_that_listens_everywhere() -> None:
    assert [here(each) for each in ("0.0.0.0", "::", "127.0.0.2")] == [
        "127.0.0.1",
        "::1",
        "127.0.0.2",
    ]


# --- counters and health --------------------------------------------------------------------------

COUNTERS = b"""# HELP kt_prefix_cache_hits_total x
# TYPE kt_prefix_cache_hits_total counter
kt_prefix_cache_hits_total 30.0
kt_prefix_cache_queries_total 120.0
vllm:prefix_cache_queries_total 1
kt_inter_token_latency_seconds_sum 2.0
kt_inter_token_latency_seconds_count 4.0
requests_total{worker="a",model="m"} 3
requests_total{worker="b",model="m"} 4
requests_total{worker="b",model="n"} 5
negative_total -5
broken_total NaN
not a line {{{ at all
"""


def test_counters_are_read_whatever_else_there_is() -> None:
    found = counters_in(COUNTERS)
    assert found.by("requests_total", "worker") == {"a": 3.0, "b": 9.0}
    assert found.total("negative_total") is None and found.total("broken_total") is None
    assert ratio(found, "prefix_cache_hits", "prefix_cache_queries", 100) == 0.25
    assert ratio(found, "prefix_cache_hits", "prefix_cache_queries", 1000) is None
    assert mean(found, "nothing", "inter_token_latency_seconds") == 0.5
    assert counters_in(b"\xff\xfe\n{").values == {}


def test_health_is_told_once() -> None:
    log = HealthLog()

    def told(*well: bool, status: str = "ready") -> list[str]:
        rows = [Worker(str(i), f"http://{i}", status, ok) for i, ok in enumerate(well)]
        return log.changes(rows)

    assert told(True, True) == []
    assert told(True, False) == ["http://1 does not answer; its requests go to the other servers"]
    assert told(True, False) == []
    assert told(True, True) == ["http://1 answers again and is used"]
    assert told(False, True, status="draining") == []
    assert told(True) == [] and told(True, True) == []
