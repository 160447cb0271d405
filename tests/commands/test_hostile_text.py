"""Hostile text files through the commands a person types: one sentence each, bounded, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chat.fake_engine import write_tokenizer
from chat.hostile import CONFINED, LONG, REFUSED
from weights.fake_checkpoint import QWEN3, random_checkpoint

MEMORY_MB = 1024
SECONDS = 20


def run(home: Path, *words: str, text: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of `kt WORDS`, whose processor time and memory must be bounded."""
    script = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'ktcli', *sys.argv[1:]])\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(f'\\n{done.returncode} {used.ru_maxrss >> 10} {used.ru_utime + used.ru_stime:.1f}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        input=text, capture_output=True, text=True, timeout=240, check=True,
        env={**os.environ, "KT_HOME": str(home), "KT_THREADS": "1"},
    )  # fmt: skip
    said, _, spent = done.stdout.rstrip("\n").rpartition("\n")
    code, memory, seconds = (float(word) for word in spent.split())
    assert "Traceback" not in done.stderr and "panicked" not in done.stderr
    assert memory < MEMORY_MB, (words, memory)
    assert seconds < SECONDS, (words, seconds)
    return int(code), said, done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(folder, {**QWEN3, "vocab_size": 420})
    write_tokenizer(folder)
    return folder


def spoiled(checkpoint: Path, folder: Path, change) -> Path:
    for each in checkpoint.iterdir():
        os.link(each, folder / each.name)
    whole = folder / "tokenizer.json"
    document = json.loads(whole.read_text())
    whole.unlink()
    whole.write_text(json.dumps(change(document)))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_every_command(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    model = str(spoiled(checkpoint, tmp_path / "model", REFUSED[name]))
    for words in (["pull", model], ["convert", model], ["chat", model, "hello"]):
        code, said, errors = run(tmp_path / "home", *words)
        assert code == 5 and said == "", words
        assert "tokenizer.json" in errors
    code, *_ = run(tmp_path / "home", "show", model)
    assert code in (0, 5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFINED)
def test_bounded_in_every_command(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    model = str(spoiled(checkpoint, tmp_path / "model", CONFINED[name]))
    text = tmp_path / "text.txt"
    text.write_text(LONG)
    for words in (
        ["pull", model],
        ["chat", model, "-n", "2"],
        ["eval", model, "--text", str(text), "-n", "64", "-c", "32"],
    ):
        code, *_ = run(tmp_path / "home", *words, text=LONG)
        assert code in (0, 2, 4, 5, 8, 10), words


def test_a_long_prompt_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    """Nothing of megabytes is cut into tokens for a model of 2,048 positions."""
    run(tmp_path / "home", "chat", "kt-mini", "hi", "-n", "1")
    code, said, errors = run(tmp_path / "home", "chat", "kt-mini", text="a word and so " * 290_000)
    assert code == 8 and said == "" and "more than 2,048 tokens" in errors
