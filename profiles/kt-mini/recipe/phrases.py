"""Facts and the ways to ask for them.

Reads `facts/*.toml`: a fact is one answer with names (`kt convert`), goals (`make a pack`) and whole questions,
some of them in ways.toml; rows of kt's tables that no file answers for become facts, too (`tables.py`).
`frames.toml` holds the sentences that names and goals are put into. `[a|b|]` means one of the
alternatives. `Phrases.draw` makes one random question, `Phrases.all_questions` every one, so that a test can compare
them with the held-out questions. A question too close to a held-out one (`TooClose`) is never used in training.
"""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import tables

HERE = Path(__file__).parent
HELD_OUT = HERE.parents[2] / "tests" / "data" / "kt_mini_questions.json"
GROUP = re.compile(r"\[([^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+)\}")
# Words that do not make another question: articles, politeness, address.
FILLERS = frozenset(
    "a an the my please pls hi hello hey ok so thanks thank you now then just".split()
)
OWN_NAMES = frozenset("country city place person name language work".split())
OF_KIND = {"slash": "flag"}  # kinds whose names are asked for as those of another
CLOSE = 0.75  # share of common words from which two are "the same"
MANY_WAYS = 1.5  # how much more often a fact comes that has ways in ways.toml
RUN = 5  # words in a row that no training question may share with a held-out one


@dataclass(frozen=True)
class Fact:
    """One answer and everything that asks for it."""

    id: str
    answer: str
    kind: str = ""
    names: tuple[str, ...] = ()
    goals: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    weight: float = 1.0
    rows: tuple[str, ...] = ()  # keys of kt's tables that it answers for


def read_toml(name: str) -> dict[str, Any]:
    """One of the files in `facts/`."""
    return tomllib.loads((HERE / "facts" / name).read_text())


def load_facts(*names: str) -> list[Fact]:
    """The facts of some files."""
    rows = [row for name in names for row in read_toml(name)["fact"]]
    return [as_fact(row) for row in rows]


def as_fact(row: dict[str, Any]) -> Fact:
    """One row of a file."""
    return Fact(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})


def table_facts(written: Iterable[Fact]) -> list[Fact]:
    """A fact of each row of kt's tables that no written fact answers for, with the ways to ask of today.toml.

    Raises:
        ValueError: a key of the files is none of the tables'.
    """
    more = {row.pop("key"): row for row in read_toml("today.toml")["row"]}
    known, answered = set(tables.row_keys()), {key for f in written for key in f.rows}
    if stale := sorted((set(more) | answered) - known):
        raise ValueError(f"kt has no longer: {', '.join(stale)}; see facts/*.toml")
    made = []
    for row in tables.rows():
        if answered.isdisjoint(row["rows"]):
            own = more.get(row["id"], {})
            for ways in ("names", "goals"):
                row[ways] += own.pop(ways, [])
            made.append(as_fact(row | own))
    return made


def with_more_ways(facts: list[Fact]) -> list[Fact]:
    """The facts with the names, goals and questions that ways.toml adds to some: these are asked for more often, too.

    Raises:
        ValueError: it adds to a fact that is none.
    """
    more = {row.pop("id"): row for row in read_toml("ways.toml")["way"]}
    if unknown := sorted(set(more) - {f.id for f in facts}):
        raise ValueError(f"ways.toml: no such fact: {', '.join(unknown)}")
    return [added(f, more[f.id]) if f.id in more else f for f in facts]


def added(fact: Fact, ways: dict[str, list[str]]) -> Fact:
    """The fact with more ways to ask for it."""
    joined: dict[str, Any] = {k: getattr(fact, k) + tuple(v) for k, v in ways.items()}
    return replace(fact, weight=MANY_WAYS * fact.weight, **joined)


def pick(text: str, rng: random.Random) -> str:
    """Choose one alternative of every group."""
    return tidy(GROUP.sub(lambda m: rng.choice(m[1].split("|")), text))


def expand(text: str) -> Iterator[str]:
    """Every choice of alternatives."""
    parts = GROUP.split(text)  # plain, group, plain, group, ..., plain
    choices = [p.split("|") if i % 2 else [p] for i, p in enumerate(parts)]
    return (tidy("".join(c)) for c in product(*choices))


def tidy(text: str) -> str:
    """Single spaces, none before punctuation."""
    return re.sub(r" ([,?.!])", r"\1", re.sub(r"\s+", " ", text)).strip()


@lru_cache(maxsize=200_000)
def content(question: str) -> frozenset[str]:
    """The words that carry a question, in any order, without punctuation and fillers."""
    words = re.findall(r"[a-z0-9_/+*-]+", question.lower().replace("'", ""))
    kept = frozenset(w for w in (w.strip("-") or w for w in words) if w not in FILLERS)
    return kept or frozenset(words)


def normalise(question: str) -> str:
    """Lower case, single spaces, letters and digits only: the form of the exact comparison."""
    return " ".join(re.findall(r"[a-z0-9_/+*-]+", question.lower().replace("'", "")))


def runs(question: str) -> Iterator[tuple[str, ...]]:
    """Every `RUN` words in a row; of a shorter question all of it."""
    words = normalise(question).split()
    return (tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1)))


class TooClose:
    """Does a question share too many words, or too many in a row, with one of the held-out questions?

    Two sets that share `CLOSE` of their words share one of the rarest few of either, so only held-out
    questions with a rare word in common are compared.
    """

    def __init__(self, held_out: Iterable[str]) -> None:
        held_out = list(held_out)
        self.runs = {run for q in held_out for run in runs(q)}
        held = [content(q) for q in held_out]
        count = Counter(w for h in held for w in h)
        self.index: dict[str, list[frozenset[str]]] = {}
        for h in held:
            n_rare = len(h) - math.ceil(CLOSE * len(h)) + 1
            for word in sorted(h, key=lambda w: (count[w], w))[:n_rare]:
                self.index.setdefault(word, []).append(h)

    def __call__(self, question: str) -> bool:
        words = content(question)
        return any(
            len(words & h) >= CLOSE * len(words | h) for w in words for h in self.index.get(w, ())
        ) or not self.runs.isdisjoint(runs(question))


def held_out_questions(path: Path = HELD_OUT) -> list[str]:
    """Every question of the test set, of all its parts."""
    return [item["question"] for part in json.loads(path.read_text()).values() for item in part]


class Phrases:
    """All facts with their frames and words; makes questions."""

    def __init__(self, too_close: TooClose, spare_words: Iterable[str] = ()) -> None:
        self.too_close = too_close
        written = load_facts("commands.toml", "concepts.toml", "chat.toml", "about.toml")
        self.facts = with_more_ways([*written, *table_facts(written)])
        self.smalltalk = load_facts("smalltalk.toml")
        decline = read_toml("decline.toml")
        self.decline = Fact("decline", decline["answer"], asks=tuple(decline["asks"]))
        self.frames = {k: tuple(v) for k, v in read_toml("frames.toml").items()}
        self.words = {k: v.split("|") for k, v in read_toml("words.toml").items()}
        known = set().union(
            *(
                content(q)
                for f in self.facts
                for t in (*f.names, *f.goals, *f.asks)
                for q in [GROUP.sub(lambda m: m[1].replace("|", " "), t)]
            )
        )
        self.words["word"] = sorted(set(spare_words) - known) or ["quux"]
        self.known = known

    def of_rows(self) -> dict[str, Fact]:
        """The fact that answers for each row of kt's tables, by the row's key."""
        return {key: fact for fact in reversed(self.facts) for key in fact.rows}

    def name_frames(self, fact: Fact) -> tuple[str, ...]:
        """Frames for the names of a fact."""
        return self.frames["any"] + self.frames.get(OF_KIND.get(fact.kind, fact.kind), ())

    def draw(self, fact: Fact, rng: random.Random) -> str:
        """One random question for a fact, never one too close to a held-out question."""
        while True:
            pools = [(p, w) for p, w in ((fact.asks, 5), (fact.goals, 4), (fact.names, 4)) if p]
            pool = rng.choices([p for p, _ in pools], [w for _, w in pools])[0]
            text = pick(rng.choice(pool), rng)
            if pool is fact.names:
                text = pick(rng.choice(self.name_frames(fact)), rng).replace("{n}", text)
            elif pool is fact.goals:
                forms = ("goal", "gerund", "third", f"{fact.kind}_goal")
                share = 2 if forms[-1] in self.frames else 0
                form = rng.choices(forms, (6, 1, 1, share))[0]
                text = in_goal_frame(pick(rng.choice(self.frames[form]), rng), text)
            text = SLOT.sub(lambda m: self.fill(m[1], rng), text)
            if not self.too_close(text):
                return text

    def fill(self, slot: str, rng: random.Random) -> str:
        """A word for a slot of a template."""
        if slot == "number":
            return str(rng.randint(1000, 99999))
        if slot == "year":
            return str(rng.randint(1000, 2030))
        if slot in ("pseudo", "gibberish"):
            return made_up(rng, joined=slot == "pseudo")
        if slot == "unknown":
            return self.unknown_command(rng)
        word = rng.choice(self.words[slot])
        return word.title() if slot in OWN_NAMES and rng.random() < 0.5 else word

    def unknown_command(self, rng: random.Random) -> str:
        """A question for a command that does not exist."""
        word = rng.choice(self.words["word"]) if rng.random() < 0.5 else made_up(rng, joined=True)
        frame = rng.choice(
            (
                "what does kt {w} do",
                "what is kt {w}",
                "how do i use kt {w}",
                "kt {w}",
                "explain kt {w}",
                "kt {w} does not work",
                "tell me about kt {w}",
                "what does the {w} command do",
                "is there a kt {w}",
                "does kt have a {w} command",
                "what is kt {w} for",
            )
        )
        return frame.format(w=word)

    def all_questions(self, fact: Fact) -> Iterator[str]:
        """Every question `draw` can make of asks, goals and names (slots left open)."""
        goal_frames = [
            s
            for form in ("goal", "gerund", "third", f"{fact.kind}_goal")
            for f in self.frames.get(form, ())
            for s in expand(f)
        ]
        name_frames = [s for f in self.name_frames(fact) for s in expand(f)]
        made = chain(
            (q for ask in fact.asks for q in expand(ask)),
            (in_goal_frame(s, g) for t in fact.goals for g in expand(t) for s in goal_frames),
            (s.replace("{n}", n) for t in fact.names for n in expand(t) for s in name_frames),
        )
        return (q for q in made if not self.too_close(q))


DOUBLED = frozenset("get run stop put set cut drop quit plan begin forget let chat".split())


def in_goal_frame(frame: str, goal: str) -> str:
    """Put a goal into a frame: `{g}` convert a model, `{ing}` converting a model, `{s}` converts a model."""
    verb, _, rest = goal.partition(" ")
    stem = (
        verb + verb[-1]
        if verb in DOUBLED
        else verb[:-1]
        if verb[-1] == "e" and verb[-2:] != "ee"
        else verb
    )
    third = verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "do", "go")) else "s")
    third = third[:-2] + "ies" if re.search(r"[^aeiou]ys$", third) else third
    return (
        frame.replace("{g}", goal)
        .replace("{ing}", f"{stem}ing {rest}".strip())
        .replace("{s}", f"{third} {rest}".strip())
    )


def made_up(rng: random.Random, *, joined: bool) -> str:
    """A word that does not exist, of syllables (joined) or of random keys."""
    if joined:
        return "".join(
            rng.choice("bcdfghjklmnpqrstvwz") + rng.choice(("a", "e", "i", "o", "u", "oo", "ar"))
            for _ in range(rng.randint(2, 4))
        ) + rng.choice(("", "n", "x", "p", "rt"))
    return "".join(rng.choice("asdfghjklqwertyuiopzxcvbnm") for _ in range(rng.randint(3, 12)))
