"""The data of kt-mini: its test questions were never trained on, its facts are well formed, and they have all of kt.

Needs no torch and no weights. That the model answers them is tested where the engine is.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path

import mini_tasks
import pytest
from mini_quality import load_items, score

RECIPE = Path(__file__).parents[1] / "profiles" / "kt-mini" / "recipe"
pytestmark = pytest.mark.skipif(
    not RECIPE.is_dir(), reason="the recipe is not part of an installed package"
)


@pytest.fixture(scope="module")
def recipe():
    """The modules `phrases` and `dialogues` of the recipe."""
    with mini_tasks.recipe():
        import dialogues
        import phrases

        yield phrases, dialogues


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Share of common words."""
    return len(a & b) / len(a | b)


def in_a_row(question: str, n: int = 5) -> set[str]:
    """Every `n` words in a row; of a shorter question all of it."""
    words = "".join(c for c in question.lower() if c.isalnum() or c in " _/+*-").split()
    return {" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def test_question_counts():
    items = load_items()
    assert len(items["kt"]) == 100
    assert len(items["decline"]) == 30
    assert all(len(items[part]) >= 10 for part in ("greetings", "sums"))
    assert all(i["required"] and all(i["required"]) for part in items.values() for i in part)


def test_scorer():
    item = {"question": "?", "required": [["int4", "4-bit"], ["12"]], "forbidden": ["know"]}
    assert score("INT4 makes 12.", item)
    assert not score("int4 makes 120", item)
    assert not score("int4 makes 12, I know", item)
    assert not score("12", item)


@pytest.mark.thorough
def test_no_question_is_in_the_training_set(recipe):
    """Of every eighth fact all expansions of every template, by five words in a row; one in sixteen by common words.
    (The model is made: this watches over its recipe.)"""
    phrases, _ = recipe
    questions = phrases.held_out_questions()
    made = phrases.Phrases(phrases.TooClose(questions))
    held = set().union(*(in_a_row(q) for q in questions))
    close = phrases.TooClose(questions)
    n = 0
    for fact in (*made.facts, *made.smalltalk)[::8]:
        for question in made.all_questions(fact):
            n += 1
            assert held.isdisjoint(in_a_row(question)), question
            assert n % 16 or not close(question), question
    assert n > 60_000


def test_the_filter_finds_what_a_plain_comparison_finds(recipe):
    """The index of rare words misses no pair."""
    phrases, _ = recipe
    questions = phrases.held_out_questions()
    close, held = phrases.TooClose(questions), [phrases.content(q) for q in questions]
    rng = random.Random(3)
    for question in questions:
        words = question.split()
        for _ in range(5):
            changed = " ".join(w for w in words if rng.random() > 0.15) or question
            plain = max(similarity(phrases.content(changed), h) for h in held) >= phrases.CLOSE
            assert close(changed) >= plain


def test_typed_questions_keep_away_too(recipe):
    """After politeness, short forms and slips of the fingers."""
    phrases, dialogues = recipe
    questions = phrases.held_out_questions()
    made = dialogues.Dialogues(phrases.Phrases(phrases.TooClose(questions)))
    close, rng = phrases.TooClose(questions), random.Random(5)
    held = set().union(*(in_a_row(q) for q in questions))
    for _ in range(4000):
        user = [text for role, text in made.turn(rng) if role == "user"]
        assert not any(close(text) for text in user)
        assert all(held.isdisjoint(in_a_row(text)) for text in user), user


def test_facts(recipe):
    """Ids are unique, answers are short sentences, every fact can be asked for."""
    phrases, _ = recipe
    made = phrases.Phrases(lambda question: False)
    facts = [*made.facts, *made.smalltalk, made.decline]
    assert len({f.id for f in facts}) == len(facts)
    for fact in facts:
        assert fact.names or fact.goals or fact.asks, fact.id
        assert fact.answer[-1] in ".!?" and len(fact.answer.split()) <= 45, fact.id
        assert fact.answer.isascii() and "[" not in fact.answer, fact.id


# --- the tables of kt ---------------------------------------------------------------------------

# Rows that are gone, but not from the weights, while a version is in the making; in a release there are none. Those
# that are newer or say something else since are told.
MOST_GONE = 6


def test_every_row_has_a_fact(recipe):
    """Whatever is a command, option, setting, variable, exit code, format, family, model or page of kt."""
    phrases, _ = recipe
    from tables import row_keys

    answered = [row for f in phrases.Phrases(lambda question: False).facts for row in f.rows]
    assert sorted(row_keys()) == sorted(set(answered))
    assert len(set(row_keys())) == len(row_keys())


def test_a_row_that_is_gone_is_named(recipe, monkeypatch):
    """A file that answers for something kt no longer has."""
    phrases, _ = recipe
    import tables

    kept = [key for key in tables.row_keys() if key != "option --greedy"]
    monkeypatch.setattr(tables, "row_keys", lambda: kept)
    with pytest.raises(ValueError, match="no longer: option --greedy"):
        phrases.Phrases(lambda question: False)


def test_what_kt_looks_up_is_not_stale(recipe):
    """Every row is answered from the tables from the day it is there."""
    import lookup
    from tables import row_keys

    assert lookup.PATH.read_text() == lookup.text(), "python docs/reference.py"
    phrases, _ = recipe
    answers = {
        key: f.answer for key, f in phrases.Phrases(lambda question: False).of_rows().items()
    }
    assert {answers[key] for key in row_keys()} == {
        row.text for row in lookup.known_rows(phrases.Phrases(lambda question: False).of_rows())
    }


def test_the_weights_believe_in_little_that_is_gone(recipe):
    import tables

    learned = json.loads(tables.LEARNED.read_text())["rows"]
    gone = sorted(set(learned) - set(tables.row_keys()))
    changes = (RECIPE.parents[2] / "CHANGELOG.md").read_text()
    most = MOST_GONE if "(unreleased)" in changes else 0
    again = "python profiles/kt-mini/recipe/make.py --start profiles/kt-mini --minutes 20"
    assert len(gone) <= most, f"kt-mini believes in {gone}; train again: {again}"


def test_the_card_is_of_these_weights(recipe):
    import tables

    card = " ".join((RECIPE.parent / "README.md").read_text().split())
    assert hashlib.sha256(tables.LEARNED.read_bytes()).hexdigest() in card
    assert f"at most {MOST_GONE} " in card


def test_what_is_planned_is_not_claimed(recipe):
    """kt-mini says of no command that it is there unless it is."""
    phrases, _ = recipe
    from tables import read_tables

    there = {words.split()[1] for words, *_ in read_tables()["commands"]}
    made = phrases.Phrases(lambda question: False)
    later = next(f for f in made.facts if f.id == "later")
    assert not {n.split()[1] for n in later.names if n.startswith("kt ")} & there
    for fact in made.facts:
        for word in re.findall(r"\bkt ([a-z]+) (?=NAME|MODEL|--)", fact.answer):
            assert word in there, fact.answer


def test_same_seed_same_conversations(recipe):
    phrases, dialogues = recipe
    made = dialogues.Dialogues(phrases.Phrases(phrases.TooClose([])))
    a, b = ([made.conversation(random.Random(7)) for _ in range(3)] for _ in range(2))
    assert a == b
    assert all(t[0] in ("system", "user", "assistant") for c in a for t in c)


def test_sums_are_right(recipe):
    _, dialogues = recipe
    rng = random.Random(11)
    for _ in range(500):
        _, _, answer = dialogues.small_sum(rng)
        left, right = answer.rstrip(".").split(" = ")
        assert eval(left) == int(right)
