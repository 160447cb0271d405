"""Patterns are narrowed to expressions without lookarounds, whose texts all match, as Python's expressions see it."""

from __future__ import annotations

import json
import re
import time

import pytest
from answers.test_grammar import Model

from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.narrowing import narrowed
from ktcli.answers.grammar.whole import Shape

# As published schemas have them, with the least and the greatest length of a text.
KNOWN = [
    (r"^((?!message|severity).)*$", 0, None),
    (r"^(?=[^!*,;{}[\]~\n]+$)(?=(.*\w)).+$", 0, None),
    (r"^(?!.*(local|meta)).*$", 0, None),
    (r"^P(?!$)(\d+Y)?(T(?=\d)(\d+H)?(\d+M)?)?$", 0, None),
    (r"^\b\d{3}\b$", 0, None),
    (r"^arn:\b(aws|cn)\b:[a-z]+$", 0, None),
    (r"^(?:^[a-z]+:)?[^\s]*$", 0, None),
    (r"(^(?!_{2}))(^[a-z_]+$)", 1, 9),
    (r"^(?!aws:.*)", 1, 9),
    (r"(?!\s*$).+", 1, 9),
    (r"(?=^.{2,6}$)(?!.*\s)[a-z ]*$", 1, None),
    (r"\A[0-9a-f]+\Z", 3, 3),
    (r"^((?!-)[a-z-]{1,6}(?<!-)\.)+[a-z]{2}$", 0, 12),
    (r"^[\w-]+(\.[\w-]+)+$", 4, 9),
    (r"^\${{\s*(.*?)\s*}}$", 0, None),
    (r"^[a-z\uD7F0-\uD7FF\uD800\uDBFF-\uDC00\uDFFF]*$", 0, None),
    (r"^(?!\*|\?)[0-9*?]{2}$", 0, None),
    (r"(a(?!b)|c)$", 0, None),
    (r"(?<=a|b)c", 0, None),
]
UNKNOWN = [r"^(a)\1$", r"^(?i:a)$", r"^[\P{C}]$", r"^a(?=b)$", r"a^b", r"^[z-a]$", "(", "x" * 5000]


def as_python(pattern: str) -> str:
    return re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08X}", pattern)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("pattern", "least", "most"), KNOWN)
def test_each_text_of_what_is_made_matches(
    model: Model, pattern: str, least: int, most: int | None
) -> None:
    made = {"type": "string", "pattern": narrowed(pattern, least, most)}
    assert made["pattern"]
    ended = 0
    for seed in range(12):
        likes = ("", 'abc"', '1"', '{}$c"')[seed % 4]
        ids = model.answer(
            Shape(Form.of_schema(made, "x")), seed, most=80, likes=likes, prompt=None
        )
        if ids is not None:
            text = json.loads(model.tokenizer.decode(ids))
            assert re.search(pattern, text) is not None, text
            assert least <= len(text) <= (len(text) if most is None else most)
            ended += 1
    assert ended


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_what_cannot_be_said_is_not_narrowed(pattern: str) -> None:
    assert narrowed(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"^(?!aws|svc-)[a-z-]+$", ["aw", "svc", "b", "aaws"]),
        (r"^(?!.*--)[a-z-]+$", ["a-b", "-", "a-b-c-"]),
        (r"^[a-z]+(?<!x)$", ["xa", "a"]),
        (r"^x(?=.*[0-9])[a-z0-9]+$", ["x1", "xab1c"]),
    ],
)
def test_little_is_lost(pattern: str, texts: list[str]) -> None:
    for text in texts:
        assert re.fullmatch(as_python(narrowed(pattern)), text), text


@pytest.mark.parametrize(
    "pattern",
    [
        "^" + "(?!.*a)(?=.*b)" * 40 + ".*$",
        "^(?!" + "|".join(f"(.*{a}.*{b})" for a in "abcdef" for b in "abcdef") + ").*$",
        "(((a?){9}){9}){9}(?!b)" * 20,
        r"\b" * 60 + "a",
        "^" + "(a|b(?!c))" * 40,
    ],
)
def test_hostile_patterns_end(pattern: str) -> None:
    began = time.thread_time()
    narrowed(pattern)
    assert time.thread_time() - began < 5
