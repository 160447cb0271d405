"""`kt bench cache`: what it says of a trace, and how it refuses what is none, in one sentence with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measure.request_traces import Line, line, written

from ktcli.main import main
from ktcli.measure import request_trace

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_CACHE", "KT_CONTEXT", "KT_PARALLEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def turns(conversations: int, rounds: int, every_ms: int = 1000) -> list[Line]:
    """Conversations in turn, each of which gets two blocks longer with each turn."""
    return [
        line(
            every_ms * (conversations * turn + n),
            1024 * (turn + 1),
            100,
            [1000 * n + each for each in range(2 * (turn + 1))],
        )
        for turn in range(rounds)
        for n in range(conversations)
    ]


@pytest.fixture
def trace(home: Path) -> str:
    return str(written(home / "trace.jsonl", turns(5, 6)))


def said(capsys: Capture, *words: str) -> str:
    assert main(["bench", "cache", *words]) == 0
    return capsys.readouterr().out


def document(capsys: Capture, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *words, "--json"))
    return found


def test_a_trace_alone_says_what_can_be_reused(capsys: Capture, trace: str) -> None:
    words = said(capsys, "--trace", trace)
    assert "30 requests in 29 s" in words and "blocks of 512" in words
    assert "71.4 % of the tokens at best, 71.4 % of the blocks" in words
    assert "Whether servers keep up depends on their speed: name a MODEL, or use --speed" in words
    assert "100 % with prefix" not in words
    found = document(capsys, "--trace", trace)
    assert found["ideal_percent"] == pytest.approx(100 * 15 / 21)
    assert (found["need"], found["tok_s"], found["block_tokens"]) == ("unknown", None, 512)
    assert [(row["servers"], row["routing"]) for row in found["results"]] == [
        (1, None),
        *((n, rule) for n in (2, 4) for rule in ("round-robin", "least-loaded", "prefix")),
    ]
    assert all(row["wait_s"] is row["load_percent"] is None for row in found["results"])


def test_a_speed_gives_an_answer_and_its_options_are_compared(capsys: Capture, trace: str) -> None:
    # 105 k tokens in 29 s, of which 30 k are new.
    assert document(capsys, "--trace", trace, "--speed", "2000")["need"] == "nothing"
    small = ("--trace", trace, "--speed", "2000", "--memory", "6ktokens,90ktokens")
    found = document(capsys, *small)
    assert found["need"] == "cache"
    assert found["needed"] == {
        "servers": 1,
        "routing": None,
        "memory_tokens": 89_600,
        "disk_tokens": 0,
    }
    words = said(capsys, *small)
    assert (
        "Only a larger cache is needed: with 89,600 tokens in memory, the server is busy" in words
    )
    routed = ("--trace", trace, "--servers", "2,3", "--speed", "900")
    assert "Only another router is needed: with prefix-aware routing" in said(capsys, *routed)
    few = ("--trace", trace, "--speed", "900")
    assert "More servers are needed: with 2 servers, prefix-aware routing" in said(capsys, *few)
    none = said(capsys, "--trace", trace, "--speed", "100")
    assert "None of these keeps up" in none and "14 servers would, at least" in none
    slower = document(capsys, "--trace", trace, "--speed", "100", "--stretch", "20")
    assert slower["need"] == "nothing"
    waiting = (*routed[:2], "--speed", "2000", "--max-wait", "0.1")
    assert document(capsys, *waiting)["need"] == "more servers than compared"


def test_answers_take_time_if_their_speed_is_known(capsys: Capture, trace: str) -> None:
    first = document(capsys, "--trace", trace, "--speed", "2000")["results"][0]
    both = document(capsys, "--trace", trace, "--speed", "2000", "--decode-speed", "200")
    row = both["results"][0]
    assert row["load_percent"] == pytest.approx(first["load_percent"] + 100 * 30 * 100 / 200 / 29)
    assert not any("not counted" in each for each in both["answer"])


def test_a_model_gives_speed_bytes_and_sizes(capsys: Capture, trace: str) -> None:
    found = document(capsys, "qwen3-30b-a3b", "--trace", trace, "--memory", "1G", "--disk", "0,1G")
    assert (found["model"], found["bytes_per_token"]) == ("qwen3-30b-a3b", 98_304)
    assert found["tok_s"] > 0 and found["tok_s_source"] == "predicted"
    assert found["results"][0]["memory_tokens"] == (1 << 30) // (98_304 * 512) * 512
    assert main(["bench", "cache", "deepseek-v3", "--trace", trace]) == 0
    words = capsys.readouterr()
    assert "tokens/s (predicted by kt plan)" in words.out and "only" in words.err
    own = document(capsys, "kt-mini", "--trace", trace, "--speed", "70")
    assert own["results"][0]["memory_tokens"] == 4 * 2048
    assert (own["tok_s"], own["tok_s_source"]) == (70, "given")
    assert {row["disk_tokens"] is None for row in own["results"]} == {True, False}


def test_bytes_and_tokens_mean_the_same(capsys: Capture, trace: str) -> None:
    in_bytes = document(
        capsys, "--trace", trace, "--bytes-per-token", "1000", "--memory", "10M", "--disk", "20M"
    )
    in_tokens = document(
        capsys, "--trace", trace, "--memory", "10485tokens", "--disk", "20971tokens"
    )
    for each in ("results", "ideal_percent"):
        assert in_bytes[each] == in_tokens[each]


def test_requests_at_one_time_have_no_load(capsys: Capture, home: Path) -> None:
    file = written(home / "once.jsonl", turns(3, 2, every_ms=0))
    words = said(capsys, "--trace", str(file), "--speed", "100")
    assert "All requests came at the same time" in words
    assert document(capsys, "--trace", str(file), "--speed", "100")["need"] == "unknown"
    said(capsys, "--trace", str(written(home / "one.jsonl", turns(1, 1))))


def test_kt_s_blocks_are_found_and_others_can_be_named(capsys: Capture, home: Path) -> None:
    lines = [line(n, 640 + n, 1, [*range(10), 100 + n]) for n in range(1, 9)]
    file = str(written(home / "trace.jsonl", lines))
    assert document(capsys, "--trace", file)["block_tokens"] == 64
    assert document(capsys, "--trace", file, "--block", "60")["block_tokens"] == 60


MANY = ",".join(map(str, range(1, 65)))
GOOD = json.dumps(line(5, 700, 9, [1, 2]))
BAD: dict[str, tuple[bytes | str, str]] = {
    "empty": ("", "has no requests"),
    "blank": ("\n \n\n", "has no requests"),
    "no JSON": (f"{GOOD}\nhello\n", "line 2 is not JSON"),
    "a half": (f"{GOOD}\n{GOOD[:30]}", "line 2 is not JSON"),
    "binary": (b"\x00\xff\x1b[2J\n", "line 1 is not JSON"),
    "a list": ("[1, 2]\n", "line 1 holds a list, not an object"),
    "deep": ("[" * 100_000 + "\n", "line 1 is not"),
    "an array file": (f"[\n{GOOD},\n{GOOD}\n]\n", "line 1 is not JSON"),
    "no ids": ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "line 1 has no hash_ids"),
    "negative": (GOOD.replace("700", "-700"), "line 1 has the input_length -700"),
    "no tokens": (GOOD.replace("700", "0"), "line 1 has the input_length 0"),
    "a text": (GOOD.replace("700", '"700"'), "line 1 has the input_length '700'"),
    "true": (GOOD.replace("700", "true"), "line 1 has the input_length True"),
    "half a token": (GOOD.replace("700", "700.5"), "line 1 has the input_length 700.5"),
    "negative answer": (GOOD.replace("9", "-9"), "line 1 has the output_length -9"),
    "before time": (GOOD.replace('p": 5', 'p": -5'), "line 1 has the timestamp -5"),
    "no time": (GOOD.replace('p": 5', 'p": NaN'), "line 1 has the timestamp nan"),
    "endless": (GOOD.replace('p": 5', 'p": 1e999'), "line 1 has the timestamp inf"),
    "back": (
        f"{GOOD}\n\n{GOOD.replace('5', '4')}",
        "line 3 has the timestamp 4, which is before 5",
    ),
    "ids": (GOOD.replace("[1, 2]", '[1, "2"]'), "line 1 has the hash_id '2'"),
    "no id": (GOOD.replace("[1, 2]", "[null, 2]"), "line 1 has the hash_id None"),
    "negative id": (GOOD.replace("[1, 2]", "[1, -2]"), "line 1 has the hash_id -2"),
    "digits": (GOOD.replace("[1, 2]", f"[1, {'9' * 4000}]"), "has the hash_id of many digits"),
    "more digits": (GOOD.replace("700", "7" * 5000), "line 1 is not JSON"),
    "an object": (GOOD.replace("[1, 2]", '{"1": 2}'), "line 1 has the hash_ids {'1': 2}"),
    "too few": (
        f"{GOOD}\n{GOOD.replace('700', '7000')}",
        "line 2 has 2 hash_ids for an input_length",
    ),
    "none": (GOOD.replace("[1, 2]", "[]"), "line 1 has 0 hash_ids for an input_length of 700"),
    "long": (" " * (request_trace.MOST_LINE_BYTES + 9) + GOOD, "line 1 is longer than 16 MiB"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_refused_in_a_sentence(capsys: Capture, home: Path, name: str) -> None:
    text, why = BAD[name]
    file = home / "trace.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    before = sorted(home.rglob("*"))
    assert main(["bench", "cache", "--trace", str(file)]) == 2
    found = capsys.readouterr()
    assert not found.out and "Traceback" not in found.err and "\x1b" not in found.err
    assert str(file) in found.err and why in found.err
    assert len(found.err) < 700
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--trace", "none"], 3, "cannot read the trace none: No such file"),
        (["--trace", "/"], 3, "cannot read the trace /: Is a directory"),
        (["--trace", "/dev/zero"], 2, "line 1 is longer than"),
        (["--trace", "a\0b"], 2, "null byte"),
        ([], 2, "--trace"),
        (["--servers", "0"], 2, "--servers cannot be '0'"),
        (["--servers", "65"], 2, "--servers cannot be '65'"),
        (["--servers", "1,"], 2, "--servers cannot be '1,'"),
        (["--servers", "٣"], 2, "--servers cannot be '٣'"),
        (["--routing", "best"], 2, "--routing has no rule 'best'"),
        (["--memory", "much"], 2, "--memory cannot be 'much'"),
        (["--memory", "-1G"], 2, "--memory cannot be '-1G'"),
        (["--disk", "40G"], 2, "--disk is in bytes, but the bytes of a token are not known"),
        (["--block", "500"], 2, "has 2 hash_ids for an input_length of 1,024, which has 3 blocks"),
        (["--speed", "nan"], 2, "--speed"),
        (["--stretch", "2"], 2, "--stretch needs the speed at which prompts are read"),
        (["--max-wait", "2"], 2, "--max-wait needs the speed"),
        (["nothing-like-it"], 3, "nothing-like-it"),
        (["--servers", MANY, "--memory", "1token,2ktokens,3ktokens"], 2, "570 combinations"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(
    capsys: Capture, trace: str, words: list[str], code: int, why: str
) -> None:
    more = [] if not words or words[0] == "--trace" else ["--trace", trace]
    assert main(["bench", "cache", *more, *words]) == code
    found = capsys.readouterr()
    assert why in found.err and not found.out and "Traceback" not in found.err
