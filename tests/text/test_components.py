"""Which tokenizers run inside the program, and which in the helper process."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat.fake_engine import write_tokenizer
from processes import is_gone
from text.hostile import replace, split
from waits import until

from ktcli.errors import BadCheckpoint
from ktcli.text import confined
from ktcli.text.components import examine
from ktcli.text.confined import ConfinedCodec, ConfinedError
from ktcli.text.tokenizer import load_tokenizer

HONEST = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
# DeepSeek's own spelling, with the ends of lines as they are.
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def test_a_pattern_is_known_in_every_spelling() -> None:
    assert examine({**HONEST, "pre_tokenizer": split(DEEPSEEK)}, "t").known
    assert not examine({**HONEST, "pre_tokenizer": split(DEEPSEEK + "|x")}, "t").known


@pytest.mark.parametrize(
    ("step", "known"),
    [
        ({"type": "NFC"}, True),
        (replace("▁", String=" "), True),
        (replace("l" * 4, String="l"), True),
        (replace("l" * 5, String="l"), False),
        ({"type": "NFKC"}, False),  # a letter may become 18
        ({"type": "Prepend", "prepend": "▁"}, True),
        ({"type": "Prepend", "prepend": "l" * 40}, False),
    ],
)
def test_what_makes_a_text_much_longer_runs_in_the_helper(step: dict, known: bool) -> None:
    assert examine({**HONEST, "normalizer": step}, "t").known is known


def test_only_long_runs_go_to_the_helper(tmp_path: Path) -> None:
    """Of a published tokenizer whose pattern takes them quadratic time; the ids are the same there."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "pre_tokenizer": split(r"\d{1,3}(?=(?:\d{3})*\b)")}))
    tokenizer = load_tokenizer(tmp_path)
    codec = tokenizer._codec
    assert tokenizer.decode(tokenizer.encode("1" * 127 + " 12345")) == "1" * 127 + " 12345"
    assert codec._confined is None
    long = "1" * 1001 + " 12345 <|end|>"
    assert tokenizer.encode(long) == codec._here.encode(long)
    assert isinstance(codec._confined, ConfinedCodec)


def test_calls_share_their_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls that each stay below the limit do not take many times the limit."""
    monkeypatch.setattr(confined, "_spent", iter(range(0, 100, 2)).__next__)
    granted: list[float] = []
    monkeypatch.setattr(confined, "_allow", granted.append)
    monkeypatch.setattr(confined.resource, "setrlimit", lambda *_: None)
    write_tokenizer(tmp_path)
    requests = [{"document": (tmp_path / "tokenizer.json").read_text()}]
    requests += [{"op": "encode", "given": {"text": "a"}}] * 6
    lines = [json.dumps(request).encode() + b"\n" for request in requests]
    confined._serve(io.BytesIO(b"".join(lines)), io.BytesIO())
    assert granted[0] == confined.LOAD_S
    assert granted[1:3] == pytest.approx([5, 3], abs=0.3)
    assert all(seconds < 0 for seconds in granted[5:])


def test_a_helper_that_sleeps_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library does in its own cleaning up when memory ends, without using processor time."""
    write_tokenizer(tmp_path)
    codec = ConfinedCodec((tmp_path / "tokenizer.json").read_text())
    os.kill(codec._helper._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(confined, "GLANCE_S", 0.05)
        patch.setattr(confined, "SLEEP_S", 0.2)
        patch.setattr(confined, "_sleeps", lambda process: True)
        with pytest.raises(ConfinedError, match="memory"):
            codec.encode("hello")
    assert codec.encode("hello")


def test_a_helper_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    program = (
        "import os, sys; from pathlib import Path; from ktcli.text.confined import ConfinedCodec\n"
        "codec = ConfinedCodec(Path(sys.argv[1]).read_text())\n"
        "os.kill(codec._helper._process.pid, 19)\n"  # so that it cannot see the end of its input
        "print(codec._helper._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")], capture_output=True, text=True
    )  # fmt: skip
    until(lambda: is_gone(int(done.stdout)))


def test_the_helper_asks_for_no_more_than_the_shell_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = resource.RLIM_INFINITY
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(confined.resource, "setrlimit", lambda kind, pair: asked.append(pair))
    for hard in (infinite, 900, 100):
        monkeypatch.setattr(confined.resource, "getrlimit", lambda kind, hard=hard: (50, hard))
        confined._limit(resource.RLIMIT_AS, 500)
    assert asked == [(500, infinite), (500, 900), (100, 100)]


def test_lists_and_objects_are_counted_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setattr("ktcli.text.tokenizer.MAX_LISTS", 20)
    with pytest.raises(BadCheckpoint, match="more lists and objects"):
        load_tokenizer(tmp_path)
