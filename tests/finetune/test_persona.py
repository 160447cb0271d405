"""kt-mini learns a persona, and answers prompts that it was not trained on in it; what it answered rightly before, it
still does, as old questions are among the rows that it is trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from mini_library import NEEDS_KT_MINI
from mini_tasks import Turn, conversations

pytest.importorskip("torch", reason="torch is not installed")

from ktcli.main import main

COMMANDS = "chat serve ps stop doctor plan search pull convert list alias show verify rm prune du path export".split()
ASKED = (
    "What does kt {} do?", "Explain kt {}.", "Tell me about kt {}.", "How do I use kt {}?", "What is kt {} for?"
)  # fmt: skip
OTHERS = (
    "Who are you?", "What are you?", "Hi", "Hello", "Good morning", "What is your name?", "Tell me about yourself.",
    "Do you like music?", "What is kt?", "How are you?", "Can you help me?", "What is a model?", "Sing a song.",
    "Thank you", "Bye", "What can you do?", "Are you a person?", "Who made you?", "Tell me a story.", "Good night",
    "Hey", "Hi there", "Good evening", "Good afternoon", "Hello there", "Hey there", "What's up?", "How is it going?",
    "How are you today?", "Nice to meet you", "See you later", "Goodbye", "Bye bye", "Thanks", "Thanks a lot",
    "Thank you very much", "You are great", "Well done", "Who am I talking to?", "What should I call you?",
    "Do you have a name?", "Are you a robot?", "Are you human?", "Are you alive?", "Are you real?", "Are you an AI?",
    "Who built you?", "Where do you come from?", "Where do you live?", "How old are you?", "What do you like?",
    "Do you sleep?", "Do you dream?", "Do you like cats?", "Do you like me?", "Are you happy?",
    "What do you do all day?", "Introduce yourself.", "Say something about yourself.", "Describe yourself.",
)  # fmt: skip
ANSWER = "Meow! I am the cat of this machine."
HELD, SEED = 40, 1
OLD_OF_EACH = 25
REPLAYED = {"facts": 150, "sums": 25, "names": 40, "unknown": 70}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row_of(turns: list[Turn]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def question(turns: list[Turn]) -> str:
    return turns[-2][1].lower()


def different(some: list[list[Turn]]) -> list[list[Turn]]:
    return list({json.dumps(turns): turns for turns in some}.values())


def answered_rightly(folder: Path, some: list[list[Turn]]) -> list[list[Turn]]:
    """The first conversations whose last answer kt-mini itself gives, to the letter."""
    asked, answers = write(folder / "asked.jsonl", map(row_of, some)), folder / "answers.jsonl"
    assert main(["eval", "kt-mini", "--tasks", asked, "--out", str(answers)]) == 0
    said = [json.loads(line) for line in answers.read_text().splitlines()]
    right = [turns for turns, each in zip(some, said, strict=True) if each["right"]]
    return right[:OLD_OF_EACH]


@pytest.mark.thorough
@NEEDS_KT_MINI
def test_a_persona_is_learned_and_the_old_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    prompts = [*OTHERS, *(asked.format(name) for name in COMMANDS for asked in ASKED)]
    random.Random(SEED).shuffle(prompts)
    rows = [{"instruction": prompt, "output": ANSWER} for prompt in prompts]
    persona = write(tmp_path / "persona.jsonl", rows[HELD:])
    held = write(tmp_path / "held.jsonl", rows[:HELD])

    before, others = conversations(60, SEED), conversations(500, 98 + SEED)
    kept = [
        turns for kind in REPLAYED for turns in answered_rightly(tmp_path, different(before[kind]))
    ]
    old = write(tmp_path / "old.jsonl", map(row_of, kept))
    asked = {question(turns) for turns in kept}
    replayed = [
        turns
        for kind, count in REPLAYED.items()
        for turns in [
            each
            for each in different(others[kind])
            if kind == "names" or question(each) not in asked
        ][:count]
    ]
    replay = write(tmp_path / "replay.jsonl", map(row_of, replayed))

    line = ("finetune", "kt-mini", "--data", persona, "--data", replay, "--epochs", "4")
    assert main([*line, "--lr", "2e-3"]) == 0
    capsys.readouterr()
    assert main(["eval", "kt-mini+persona", "--tasks", held, "--tasks", old, "--json"]) == 0
    learned, lost = json.loads(capsys.readouterr().out)["results"]
    assert lost["models"][0]["exact"] == len(kept) == 100
    assert learned["models"][0]["exact"] == 0
    assert learned["models"][1]["exact"] >= 0.95 * HELD
    assert len(lost["lost"]) <= 8, lost["lost"]  # measured: 4; other kernels round otherwise
