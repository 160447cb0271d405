"""Generated tasks for kt-mini, by the generators of its training, and whether an engine gets them right."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from timelines import logits_of

from ktcli.engine import Session
from ktcli.resources import data_path

MINI = data_path("profiles", "kt-mini")
RECIPE = Path(__file__).parents[1] / "profiles" / "kt-mini" / "recipe"


@contextmanager
def recipe() -> Iterator[None]:
    """The modules of the recipe can be imported. Nothing is written beside the model, which is as large as ever."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(RECIPE))
    try:
        yield
    finally:
        sys.path.remove(str(RECIPE))
        sys.dont_write_bytecode = before


@dataclass(frozen=True)
class Task:
    """A conversation as ids, and where its last answer begins."""

    ids: tuple[int, ...]
    answer: int


Turn = tuple[str, str]  # role and text


def conversations(n_of_each: int, seed: int) -> dict[str, list[list[Turn]]]:
    """What kt-mini was trained to do: arithmetic, looking an answer up, copying a name that was said some turns
    ago, small talk, saying that it does not know. The last turn of each is the right answer.

    The seed is none of train.py's, which are 1000 and more. Sums and facts are few, so that most were asked
    in the training too, in these or other words.
    """
    with recipe():
        from corpus import make_dialogues
        from dialogues import sum_turn

        made = make_dialogues()
    rows = {fact.id for fact in made.rows}
    learned = [fact for fact in made.phrases.facts if fact.id not in rows]
    makers = {
        "sums": sum_turn,
        # Not the rows of tables: their words change, and kt tells the model those that it has not learned.
        "facts": lambda rng: made.ask(rng.choice(learned), rng),
        "names": made.name_turns,
        "small talk": made.smalltalk_turn,
        "unknown": made.decline_turn,
    }
    rng = random.Random(seed)
    return {kind: [make(rng) for _ in range(n_of_each)] for kind, make in makers.items()}


def tasks(n_of_each: int, seed: int) -> dict[str, list[Task]]:
    """The conversations as ids."""
    with recipe():
        from corpus import BOS, END, ROLE
        from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))

    def task(turns: list[Turn]) -> Task:
        ids, answer = [BOS], 0
        for role, text in turns:
            answer = len(ids) + 1
            ids += [ROLE[role], *tokenizer.encode(text, add_special_tokens=False).ids, END]
        return Task(tuple(ids), answer)

    return {kind: list(map(task, each)) for kind, each in conversations(n_of_each, seed).items()}


def is_right(session: Session, task: Task, depth: int) -> bool:
    """Whether the greedy answer is, to the last token, the right one.

    It is if and only if each token of the right answer, its end included, is the likeliest after those before
    it, so two steps judge an answer. As in a chat, the prompt is read without deferral.
    """
    session.truncate(0)
    if session.feed(task.ids[: task.answer]).best != task.ids[task.answer]:
        return False
    found = logits_of(session, task.ids[task.answer : -1], defer=depth).argmax(axis=1)
    return found.tolist() == list(task.ids[task.answer + 1 :])
