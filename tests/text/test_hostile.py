"""Hostile text files end in one sentence, within bounded processor time and memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from chat.fake_engine import write_tokenizer
from peak import PEAK
from text.hostile import CONFINED, LETTERS, REFUSED, long_text

from ktcli.errors import BadCheckpoint
from ktcli.interrupt import Interrupt
from ktcli.text.tokenizer import load_tokenizer

READ = (
    PEAK
    + """
import resource, sys
from pathlib import Path
from ktcli.text.tokenizer import load_tokenizer
from ktcli.errors import BadCheckpoint
try:
    print(len(load_tokenizer(Path(sys.argv[1])).encode(sys.argv[2] * int(sys.argv[3]) + "!")))
except BadCheckpoint as error:
    print(error)
own, child = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(max(peak_kib(), child.ru_maxrss) >> 10, own.ru_utime + child.ru_utime)
"""
)


def written(folder: Path, change) -> Path:
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return folder


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_publishes_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, REFUSED[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.json") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


# These take seconds, until the limit ends them.
SLOW = (
    "quadratic", "looking ahead", "growing", "pieces of every length", "words of any length", "runs of digits",
    "runs of spaces",
)  # fmt: skip


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in SLOW)) for name in CONFINED],
)
def test_what_nobody_has_looked_at_is_bounded(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, CONFINED[name])
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder), LETTERS.get(name, "a"), "100000"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    said, spent = done.stdout.strip().splitlines()
    memory, seconds = map(float, spent.split())
    assert said.isdigit() or "tokenizer.json" in said
    assert done.stderr == ""
    assert memory < 1024 and seconds < 20


def test_ctrl_c_ends_a_pattern_that_does_not(tmp_path: Path) -> None:
    """At the first press, although an answer is being made; and the tokenizer can be used again."""
    tokenizer = load_tokenizer(written(tmp_path, CONFINED["quadratic"]))
    press = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    started = time.process_time()
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        press.start()
        tokenizer.encode(long_text("quadratic"))
    assert interrupt.asked
    assert time.process_time() - started < 5
    assert tokenizer.decode(tokenizer.encode("again")) == "again"


def test_a_helper_that_dies_is_one_sentence_and_the_next_call_starts_another(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(written(tmp_path, CONFINED["quadratic"]))
    tokenizer._codec._helper._process.kill()
    with pytest.raises(BadCheckpoint, match="memory"):
        tokenizer.encode("hello")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@pytest.mark.parametrize(
    ("seed", "rounds"), [(3, 60), pytest.param(2, 500, marks=pytest.mark.thorough)]
)
def test_mutations_are_read_or_refused(tmp_path: Path, seed: int, rounds: int) -> None:
    write_tokenizer(tmp_path)
    program = Path(__file__).with_name("fuzz_tokenizer.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(seed), str(rounds)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    refused, read = map(int, done.stdout.split())
    assert refused and read and refused + read == rounds
