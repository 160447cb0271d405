"""Hostile text files through the commands a person types: one sentence each, bounded, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from chat.fake_engine import SPECIALS, write_tokenizer
from gguf_cases import CASES
from gguf_models import write_gguf
from text.hostile import CONFINED, LYING, REFUSED, long_text
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli.weights.vocabulary import MAX_MERGES

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
    random_checkpoint(folder, {**QWEN3, "vocab_size": 420, "max_position_embeddings": 32768})
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


# Cases for every command. Each other case is for one that reads the file as the others do, in turn.
OFTEN = frozenset([*[*REFUSED][::8], *[*CONFINED][::4]])


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_every_command(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    model = str(spoiled(checkpoint, tmp_path / "model", REFUSED[name]))
    commands = [["pull", model], ["chat", model, "hello"], ["convert", model]]
    for words in commands if name in OFTEN else [commands[[*REFUSED].index(name) % 2]]:
        code, said, errors = run(tmp_path / "home", *words)
        assert code == 5 and said == "", words
        assert "tokenizer.json" in errors and errors.count("\n") <= 2, errors
    if name in OFTEN:
        code, *_ = run(tmp_path / "home", "show", model)
        assert code in (0, 5)


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("name", CONFINED)
def test_bounded_in_every_command(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    model = str(spoiled(checkpoint, tmp_path / "model", CONFINED[name]))
    text = tmp_path / "text.txt"
    text.write_text(long_text(name))
    chat = ["chat", model, "-n", "2"]
    evaluate = ["eval", model, "--text", str(text), "-n", "64", "-c", "32"]
    reading = [chat, evaluate] if name in OFTEN else [[chat, evaluate][[*CONFINED].index(name) % 2]]
    for words in (["pull", model], *reading):
        code, *_ = run(tmp_path / "home", *words, text=long_text(name))
        assert code in (0, 2, 4, 5, 8, 10), words


@pytest.mark.thorough
def test_tables_of_junk_in_a_sentencepiece_file(checkpoint: Path, tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("the theory of the thing, then there\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, num_threads=1, minloglevel=2,
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity",
    )  # fmt: skip
    honest = (tmp_path / "tokenizer.model").read_bytes()
    model = tmp_path / "model"
    model.mkdir()
    for each in checkpoint.iterdir():
        if each.name != "tokenizer.json":
            os.link(each, model / each.name)
    for data in LYING:
        table = b"\x12" + _varint(len(data)) + data  # NormalizerSpec.precompiled_charsmap
        whole = honest + b"\x1a" + _varint(len(table)) + table
        (model / "tokenizer.model").write_bytes(whole)
        code, *_, errors = run(tmp_path / "home", "chat", str(model), "hello", "-n", "1")
        assert not data or (code == 5 and "tokenizer.model" in errors), errors
        code, *_, errors = run(tmp_path / "home", "pull", str(model))
        assert not data or (code == 5 and "tokenizer.model" in errors), errors


def _varint(value: int) -> bytes:
    low = value & 127
    return bytes([low | 128]) + _varint(value >> 7) if value >> 7 else bytes([low])


@pytest.mark.thorough
@pytest.mark.rotates(2)
@pytest.mark.parametrize("count", [MAX_MERGES, MAX_MERGES + 1, 1_900_000, 3_900_000])
def test_merges_of_a_gguf_file(tmp_path: Path, count: int) -> None:
    """They are bounded while they are read, so that as many as are read fit into the memory too."""
    case = next(case for case in CASES if case.name == "kt-mini-q8_0")
    honest: list[str] = case.metadata["tokenizer.ggml.merges"]
    merges = honest + honest[:1] * (count - len(honest))
    metadata = {**case.metadata, "tokenizer.ggml.merges": merges}
    model = str(write_gguf(replace(case, metadata=metadata), tmp_path / "model.gguf"))
    for words in (
        ["show", model],
        ["pull", model],
        ["convert", model],
        ["chat", model, "hi", "-n", "1"],
    ):
        code, *_, errors = run(tmp_path / "home", *words)
        assert code == (0 if count == MAX_MERGES else 5) or words[0] == "show", (words, errors)


TEMPLATES = {
    "text": "{% set t = 'hello ' * 600000 %}{{ t }}{{ t }}{{ t }}{{ t }}",
    "special tokens": f"{{% set t = '{SPECIALS[1]}' * 300000 %}}{{{{ t }}}}{{{{ t }}}}{{{{ t }}}}{{{{ t }}}}",
    "spaces": "{% set t = ' ' * 4000000 %}{{ t }}{{ t }}{{ t }}{{ t }}",
    "after an answer": "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'hello ' * 600000 }}",
    "parts of words": "{{ messages[0].content }}{{ '<|' * 1000000 }}{{ 'end|>' * 700000 }}",
    "namespaces": (
        "{% set a = namespace() %}{% set a.b = 'x' * 4000000 %}{% set a.c = a %}{% set b = namespace() %}"
        "{% set b.a = [a] * 40000 %}{% set b.b = b %}{{ b.none.none }}"
    ),
    "a namespace as a key": (
        "{% set a = namespace() %}{% set a.b = ['x' * 4000000] * 4 %}{{ {}[a] }}"
    ),
    "a namespace that is raised": (
        "{% set a = namespace() %}{% set a.b = ['x' * 4000000] * 4 %}{{ raise_exception(a) }}"
    ),
    "a namespace in a filter": (
        "{% set a = namespace() %}{% set a.b = ['x' * 4000000] * 4 %}{{ [a, a] | join(a) }}{{ a | tojson }}"
    ),
    "doubling": (
        "{% set a = namespace() %}{% set a.b = 'xx' %}{% for i in range(60) %}{% set a.b = a.b ~ a.b %}{% endfor %}"
    ),
    "the sandbox": "{{ messages.__class__ }}{{ raise_exception.__self__.meter }}",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_bounded(checkpoint: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for each in checkpoint.iterdir():
        os.link(each, model / each.name)
    config = model / "tokenizer_config.json"
    honest = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**honest, "chat_template": TEMPLATES[name]}))
    for question in ("hello", "<|end|> [<"):
        code, said, errors = run(tmp_path / "home", "chat", str(model), question, "-n", "1")
        assert code in (5, 8) and said == "", errors
        assert errors.count("\n") <= 4 and not any(
            word in errors for word in ("meter", "__self__", "Namespace", "Sandbox", "0x")
        ), errors


def _busy(process: int) -> bool:
    """Returns whether a child of a process has used half a second of processor time."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        stats = [Path(f"/proc/{child}/stat").read_text() for child in children]
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or in the middle
        return False
    ticks = os.sysconf("SC_CLK_TCK")
    return any(int(stat.rpartition(")")[2].split()[11]) > ticks / 2 for stat in stats)


def interrupted(home: Path, words: list[str], text: Path) -> tuple[float, str]:
    """The seconds that `kt WORDS` still ran after one SIGINT to it while its helper was busy, and what it said."""
    with (
        text.open() as given,
        subprocess.Popen(
            [sys.executable, "-m", "ktcli", *words], stdin=given, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, env={**os.environ, "KT_HOME": str(home), "KT_THREADS": "1"},
        ) as process,
    ):  # fmt: skip
        while not _busy(process.pid):
            assert process.poll() is None, "it ended before it was interrupted"
            time.sleep(0.05)
        pressed = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT)
        return time.monotonic() - pressed, errors.decode()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["looking ahead", "runs of digits"])
def test_ctrl_c_ends_kt_while_it_reads_hostile_text(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "model").mkdir()
    model = str(spoiled(checkpoint, tmp_path / "model", CONFINED[name]))
    text = tmp_path / "text.txt"
    text.write_text(long_text(name))
    run(tmp_path / "home", "chat", model, "hi", "-n", "1")  # converted
    for words in (["chat", model], ["eval", model, "--text", str(text), "-n", "64", "-c", "32"]):
        seconds, errors = interrupted(tmp_path / "home", words, text)
        assert seconds < 2 and "Traceback" not in errors, (words, seconds, errors)


@pytest.mark.thorough
def test_a_long_prompt_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    """Nothing of megabytes is cut into tokens for a model of 2,048 positions."""
    run(tmp_path / "home", "chat", "kt-mini", "hi", "-n", "1")
    code, said, errors = run(tmp_path / "home", "chat", "kt-mini", text="a word and so " * 290_000)
    assert code == 8 and said == "" and "more than 2,048 tokens" in errors
