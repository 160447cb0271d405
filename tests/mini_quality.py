"""Scoring of kt-mini's answers by required and forbidden words; the questions are data.

An item of `tests/data/kt_mini_questions.json` is a question, `required`: groups of alternatives of which each
group must be met, and `forbidden`: words that must not occur. Case does not matter. Numbers count only as
whole numbers, so that "15" is not met by "150".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

QUESTIONS = Path(__file__).parent / "data" / "kt_mini_questions.json"


def load_items() -> dict[str, list[dict[str, Any]]]:
    """The parts of the test set: kt, greetings, decline, sums."""
    return json.loads(QUESTIONS.read_text())


def contains(answer: str, word: str) -> bool:
    """Is the word in the answer? Numbers must stand alone."""
    if re.fullmatch(r"-?\d+", word):
        return re.search(rf"(?<![\d.]){re.escape(word)}(?![\d]|\.\d)", answer) is not None
    return word.lower() in answer.lower()


def score(answer: str, item: dict[str, Any]) -> bool:
    """Right if one word of every required group is there and no forbidden word is."""
    return all(any(contains(answer, w) for w in group) for group in item["required"]) and not any(
        contains(answer, w) for w in item["forbidden"]
    )
