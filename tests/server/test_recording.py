"""`kt serve --record-trace`: what is written, into which files, and that a replay of it finds what the server found."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import requests
from mini_library import NEEDS_KT_MINI
from ports import free_port
from server.running import served_by_command
from waits import until

from ktcli.errors import Busy, KtError, UsageError
from ktcli.main import main
from ktcli.measure.block_cache import BlockCache
from ktcli.measure.request_trace import read_trace
from ktcli.server.process import requestrecorder
from ktcli.server.process.requestrecorder import (
    BLOCK_TOKENS,
    BlockHasher,
    RequestRecorder,
    TraceFile,
)

KEY = bytes(32)
PAGES = 32  # of two contexts of 1,024 tokens
LINE = '{"timestamp":40,"input_length":70,"output_length":3,"hash_ids":[1,2]}\n'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorder(path: Path, said: list[str] | None = None) -> RequestRecorder:
    warn = (lambda text: None) if said is None else said.append
    return RequestRecorder(TraceFile.open(path), BlockHasher(KEY), warn)


@pytest.mark.thorough
@NEEDS_KT_MINI
def test_a_replay_finds_what_the_server_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_CACHE", "0")
    file, draw = home / "trace.jsonl", random.Random(3)
    words = (Path(__file__).parents[2] / "docs" / "cache.md").read_text().split()
    chats = [[{"role": "system", "content": " ".join(words[:80])}] for _ in range(6)]
    seen: list[tuple[int, int, int]] = []
    options = (
        "--record-trace",
        str(file),
        "--threads",
        "1",
        "--context",
        "1024",
        "--parallel",
        "2",
    )
    with served_by_command(*options) as url:
        for _ in range(40):
            chat = chats[draw.choice((0, 0, 0, 1, 1, 2, 3, 4, 5))]
            del chat[1 if len(chat) > 10 else len(chat) :]
            chat.append({"role": "user", "content": " ".join(draw.sample(words, 40))})
            body = {"model": "kt-mini", "messages": chat, "max_tokens": 16}
            answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            usage, said = answer["usage"], answer["choices"][0]["message"]["content"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            seen.append((usage["prompt_tokens"], cached, usage["completion_tokens"]))
            chat.append({"role": "assistant", "content": said})
        monkeypatch.delenv("KT_TILE_MIN", raising=False)  # it would load the model here
        assert main(["chat", "kt-mini", "What is kt?"]) == 0  # with the server's model
        until(lambda: len(lines_of(file)) > len(seen))  # the line may come after the answer
    *found, attached = lines_of(file)
    assert 0 < attached["input_length"] < 100 and attached["output_length"]
    assert [(each["input_length"], each["output_length"]) for each in found] == [
        (prompt, said) for prompt, _, said in seen
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    # The server also takes the beginning of a page that goes on differently, at most one for each prompt.
    pages = [cached // BLOCK_TOKENS for _, cached, _ in seen]
    trace = read_trace(file)
    assert trace.block == BLOCK_TOKENS
    whole, small = BlockCache(trace, None), BlockCache(trace, PAGES)
    unlimited = [whole.put(n) for n in range(trace.requests - 1)]
    replayed = [small.put(n) for n in range(trace.requests - 1)]
    assert all(a <= b for a, b in zip(pages, unlimited, strict=True))
    assert sum(replayed) < sum(unlimited)  # pages were dropped, by both
    assert sum(replayed) == pytest.approx(sum(pages), rel=0.03)


def test_lines_have_the_form_of_published_traces_and_no_text(home: Path) -> None:
    file = home / "trace.jsonl"
    made = recorder(file)
    shared = [*range(100)]
    made.begin("m", [*shared, 1])(7)
    made.begin("m", [*shared, 2])(0)
    made.begin("other", [*shared, 1])(1)
    made.close()
    first, second, other = lines_of(file)
    assert list(first) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert (first["input_length"], first["output_length"], len(first["hash_ids"])) == (101, 7, 2)
    assert first["hash_ids"][0] == second["hash_ids"][0]
    assert first["hash_ids"][1] != second["hash_ids"][1]  # a part of a block is another one
    assert not set(first["hash_ids"]) & set(other["hash_ids"])
    assert all(0 <= each < 1 << 53 for each in first["hash_ids"])
    assert BlockHasher(bytes(31) + b"\1").numbers("m", shared) != BlockHasher(KEY).numbers(
        "m", shared
    )


def test_the_key_is_random_kept_and_its_owners_alone(home: Path) -> None:
    ids = [*range(64)]
    first = BlockHasher.of_library().numbers("", ids)
    assert BlockHasher.of_library().numbers("", ids) == first
    key = home / "home" / "trace.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.unlink()
    assert BlockHasher.of_library().numbers("", ids) != first


def test_requests_are_written_in_the_order_in_which_they_came(home: Path) -> None:
    file = home / "trace.jsonl"
    made = recorder(file)
    ends = [made.begin("", [n]) for n in range(4)]
    for n in (3, 1, 0):
        ends[n](n)
    made.close()  # the third has not ended
    found = lines_of(file)
    assert [each["output_length"] for each in found] == [0, 1, 0, 3]
    assert sorted(each["timestamp"] for each in found) == [each["timestamp"] for each in found]


def test_an_answer_that_never_ends_holds_nothing_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requestrecorder, "MOST_WAITING", 3)
    file = home / "trace.jsonl"
    made = recorder(file)
    late = made.begin("", [9])
    for n in range(4):
        made.begin("", [n])(1)
    until(lambda: len(lines_of(file)) == 5)
    late(5)  # too late, and harmless
    made.close()
    assert [each["output_length"] for each in lines_of(file)] == [0, 1, 1, 1, 1]


def test_a_trace_goes_on_where_it_ended(home: Path) -> None:
    file = home / "trace.jsonl"
    file.write_text(LINE + LINE[:30])
    file.chmod(0o600)
    os.utime(file, (0, file.stat().st_mtime - 5))
    made = recorder(file)
    made.begin("", [1])(1)
    made.close()
    first, second = lines_of(file)
    assert first["timestamp"] == 40
    assert 5_000 <= second["timestamp"] - 40 < 500_000
    assert read_trace(file).requests == 2


def test_two_servers_do_not_write_one_trace(home: Path) -> None:
    made = recorder(home / "trace.jsonl")
    with pytest.raises(Busy, match="another process records into"):
        TraceFile.open(home / "trace.jsonl")
    made.close()
    TraceFile.open(home / "trace.jsonl").close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("export PATH=/bin\n", "something other than a trace"),
        ("no end of a line", "something other than a trace"),
        ("export PATH=/bin\n" + LINE, "something other than a trace"),
        (LINE.replace("70", "7000"), "something other than a trace in blocks of 64 tokens"),
    ],
)
def test_other_files_are_left_as_they_are(home: Path, text: str, why: str) -> None:
    file = home / "file"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UsageError, match=why):
        TraceFile.open(file)
    assert file.read_text() == text


def test_a_trace_that_others_can_read_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "trace.jsonl"
    file.write_text(LINE)
    file.chmod(0o644)
    assert main(["serve", "kt-mini", "--port", str(free_port()), "--record-trace", str(file)]) == 2
    said = capsys.readouterr().err
    assert "others can read or write" in said and f"chmod 600 {file}" in said
    assert file.read_text() == LINE
    (home / "link").symlink_to(file)
    for path in (home / "link", home, home / "none" / "trace", Path("/dev/null")):
        with pytest.raises(KtError):
            TraceFile.open(path)


def test_a_full_trace_or_disk_ends_the_recording_with_a_word(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(requestrecorder, "MOST_BYTES", 200)  # of lines of 60 to 80
    made = recorder(home / "full", said)
    ends = [made.begin("", [n]) for n in range(4)]
    for end in ends:
        end(1)
    made.close()
    made.begin("", [1])(1)
    assert len(lines_of(home / "full")) == 2
    assert len(said) == 1 and "no longer recorded" in said[0]
    with pytest.raises(UsageError, match="records at most"):
        monkeypatch.setattr(requestrecorder, "MOST_BYTES", 50)
        TraceFile.open(home / "full")
