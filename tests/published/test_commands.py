"""What somebody types with a published file, from pull and plan to chat, eval, bench and serve; and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from published.packages import GEMMA3, SMOLLM2

from ktcli.errors import BadCheckpoint
from ktcli.main import main

pytestmark = pytest.mark.published
Capture = pytest.CaptureFixture[str]
# What SmolLM2 begins with is decided here: "The" is 0.8 nats ahead in f32 (0.1 at "What is the capital of France?").
QUESTION = "Name the capital city of France."


@pytest.fixture(autouse=True)
def library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(home))


def document(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_published_file_is_looked_at_before_anything_is_made(
    smollm2: Path, capsys: Capture
) -> None:
    file = str(smollm2)
    found = document(capsys, "pull", file)
    assert (found["path"], found["downloaded"]) == (file, False)
    shown = document(capsys, "show", file)
    assert shown["architecture"]["layers"] == 30
    assert document(capsys, "plan", file)["model"] == SMOLLM2.file


def test_it_is_converted_and_answers(smollm2: Path, capsys: Capture) -> None:
    """In the format that kt takes by itself."""
    made = document(capsys, "convert", str(smollm2))
    pack = made["path"]
    assert made["error"]["dense"] < 0.02
    assert document(capsys, "verify", pack)["ok"]
    answer = document(capsys, "chat", str(smollm2), QUESTION, "--greedy", "-n", "16")
    assert "Paris" in answer["text"]


def test_it_is_measured(smollm2: Path, capsys: Capture) -> None:
    found = document(capsys, "eval", str(smollm2), "--tokens", "512")
    (row,) = found["results"]
    assert 0.5 < row["nll"]["mean"] < 5  # where its predictions were even, 10.8
    (row,) = document(capsys, "bench", "decode", str(smollm2), "-n", "2")["results"]
    assert (row["work"], row["n_tokens"]) == ("decode", 2)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of `kt serve MODEL` in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "ktcli", "serve", str(model), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        begun = any(line.startswith("serving") for line in process.stderr)
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        try:
            assert begun
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            reader.join()
            assert process.wait(60) == 0


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_it_is_served(smollm2: Path) -> None:
    settings = {"model": SMOLLM2.file, "temperature": 0, "max_tokens": 16}
    with served(smollm2) as url:
        messages = [{"role": "user", "content": QUESTION}]
        chatted = post(f"{url}/v1/chat/completions", messages=messages, **settings)
        assert "Paris" in chatted["choices"][0]["message"]["content"]
        gone_on = post(f"{url}/v1/completions", prompt="The capital of France is", **settings)
        assert gone_on["choices"][0]["text"].startswith(" Paris")


def test_a_base_model_goes_on_with_texts(gemma3: Path, capsys: Capture) -> None:
    """It has no template, which is said; with one beside its weights, it is talked to."""
    file = str(gemma3)
    assert document(capsys, "pull", file)["path"] == file
    assert document(capsys, "show", file)["architecture"]["layers"] == 18
    assert document(capsys, "plan", file)["model"] == GEMMA3.file
    pack = Path(document(capsys, "convert", file)["path"])
    error = document(capsys, "chat", file, QUESTION, code=BadCheckpoint.exit_code)["error"]
    assert "has no chat template" in error["message"] and str(pack) in error["hint"]
    (pack / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    days = "Monday, Tuesday, Wednesday,"
    answer = document(capsys, "chat", file, days, "--greedy", "-n", "8")
    assert answer["text"].strip().startswith("Thursday, Friday")
