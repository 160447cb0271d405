"""Every command that starts threads: it takes --numa too, and refuses more threads than there are cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktcli.commands.completion import verbs
from ktcli.hardware.probe import probe
from ktcli.main import main

LINES = {
    "chat": ["kt-mini", "hello"],
    "serve": ["kt-mini", "--port", "58435"],
    "convert": ["kt-mini"],
    "eval": ["kt-mini"],
    "finetune": ["kt-mini", "--data", "mine.jsonl"],
    "plan": ["kt-mini"],
    "bench decode": ["kt-mini"],
    "bench prefill": ["kt-mini"],
    "bench resume": ["kt-mini"],
    "bench finetune": ["kt-mini"],
    "bench mixed": ["kt-mini"],
    "bench kernel": ["--shape", "64,64,4,2"],
    "logits": ["kt-mini", "--ids", "ids.json", "--out", "logits.npy"],  # not in the help
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_ISA", "KT_THREADS", "KT_NUMA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("ids.json").write_text("[1, 2]")
    Path("mine.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    return tmp_path


def test_every_command_has_its_line() -> None:
    options = {verb.words: {flag.name for flag in verb.flags} for verb in verbs()}
    assert {words for words, found in options.items() if "--threads" in found} == {*LINES} - {
        "logits"
    }
    # What a conversion writes knows nothing of nodes.
    assert {words for words, found in options.items() if "--numa" in found} == {*LINES} - {
        "logits",
        "convert",
    }


@pytest.mark.parametrize("by", ["--threads", "KT_THREADS"])
@pytest.mark.parametrize("words", LINES)
def test_more_threads_than_cores(
    words: str,
    by: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = [*words.split(), *LINES[words]]
    if by == "--threads":
        line += ["--threads", "4096"]
    else:
        monkeypatch.setenv("KT_THREADS", "4096")
    assert main(line) == 2
    said = capsys.readouterr()
    cores = len(probe().cpu.cores)
    assert (
        f"4096{' threads' if by == '--threads' else ''}, but only {cores} physical core" in said.err
    )
    assert "kt doctor" in said.err and "Traceback" not in said.err
    assert said.out == ""
    assert not (home / "logits.npy").exists()
