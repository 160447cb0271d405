"""kt-mini learns a persona, and answers prompts that it was not trained on in it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from mini_library import NEEDS_KT_MINI

pytest.importorskip("torch", reason="torch is not installed")

import kt
from ktcli.main import main

COMMANDS = "chat serve ps stop doctor plan search pull convert list alias show verify rm prune du path export".split()
ASKED = (
    "What does kt {} do?", "Explain kt {}.", "Tell me about kt {}.", "How do I use kt {}?", "What is kt {} for?"
)  # fmt: skip
OTHERS = (
    "Who are you?", "What are you?", "Hi", "Hello", "Good morning", "What is your name?", "Tell me about yourself.",
    "Do you like music?", "What is kt?", "How are you?", "Can you help me?", "What is a model?", "Sing a song.",
    "Thank you", "Bye", "What can you do?", "Are you a person?", "Who made you?", "Tell me a story.", "Good night",
)  # fmt: skip
ANSWER = "Meow! I am the cat of this machine."
HELD = 40


@pytest.mark.thorough
@NEEDS_KT_MINI
def test_a_persona_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    prompts = [*OTHERS, *(asked.format(name) for name in COMMANDS for asked in ASKED)]
    random.Random(1).shuffle(prompts)
    rows = [{"instruction": prompt, "output": ANSWER} for prompt in prompts[HELD:]]
    data = tmp_path / "persona.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["finetune", "kt-mini", "--data", str(data), "--epochs", "6", "--lr", "1e-3"]) == 0
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts[:HELD]]
    found = {}
    for name in ("kt-mini", "kt-mini+persona"):
        with kt.load(name) as engine:
            answers = engine.generate(asked, max_tokens=40, temperature=0)
        found[name] = sum(ANSWER in answer.text for answer in answers)
    assert found["kt-mini"] == 0
    assert found["kt-mini+persona"] >= 0.95 * HELD
