"""Answers read by templates, in any pieces, are what transformers reads in the whole text."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from typing import Any

import pytest
from answers.answer_templates import ANSWERS, TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.answers.templates.parser import AnswerParser, Closes, Says
from ktcli.answers.templates.template import read_template

READ = {name: read_template(value) for name, value in TEMPLATES.items()}
CASES = [(name, *each) for name, answers in ANSWERS.items() for each in answers]


def judged(name: str, prompt: str, text: str) -> Any:
    """What transformers makes of an answer; None: it fails."""
    from transformers.utils.chat_parsing import parse_response

    try:
        return parse_response(text, TEMPLATES[name], prefix=prompt)
    except ValueError:
        return None


def read(name: str, prompt: str, pieces: list[str]) -> Any:
    """What kt makes of it, put together as transformers does; None: a field means nothing."""
    parser = AnswerParser(READ[name])
    parser.prime(prompt)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert "".join(_heard(event) for event in events) == "".join(pieces)
    defaults = TEMPLATES[name].get("defaults", {})
    found: dict[str, Any] = deepcopy(defaults)
    for event in events:
        if not isinstance(event, Closes):
            continue
        try:
            value = event.field.value(event.body, event.groups)
        except ValueError:
            return None
        key, join = event.field.name, event.field.join
        if join is not None:
            found[key] = value if found.get(key) is None else found[key] + join + value
        elif event.field.repeats:
            found.setdefault(key, []).append(value)
        else:
            found[key] = value
    full = {key: value for key, value in found.items() if value not in (None, "", [], {})}
    return {**{key: found[key] for key in defaults}, **full}


def _heard(event: Any) -> str:
    return str(event.text)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({at % (len(text) + 1) for at in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(("name", "prompt", "text"), CASES)
def test_letter_by_letter_as_in_one_piece(name: str, prompt: str, text: str) -> None:
    if prompt:  # an earlier answer is none of this one
        prompt = f"{prompt}<think> to=user<|message|>x\n{prompt}"
    wanted = judged(name, prompt, text)
    assert wanted is not None
    assert read(name, prompt, [text]) == wanted
    assert read(name, prompt, list(text)) == wanted


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_families_call_the_tool(name: str) -> None:
    prompt, text = next(each for each in ANSWERS[name] if "get_weather" in each[1])
    call = read(name, prompt, list(text))["tool_calls"][0]["function"]
    days: Any = [3, 4] if name == "invoke" else 3 if name != "qwen3.5" else "3"
    assert call == {"name": "get_weather", "arguments": {"city": "Paris", "days": days}}


def _marks(name: str) -> list[str]:
    """The marks of the answers of a family, and what is nearly one."""
    said = "".join(text for _, text in ANSWERS[name])
    words = [word for field in READ[name].fields for word in field.words if "\\" not in word]
    return [
        *words,
        *(word[:-1] for word in words if len(word) > 1),
        said,
        "\n",
        " ",
        "x",
        '{"a": 1}',
    ]


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_split_of_any_answer(name: str, data: st.DataObject) -> None:
    marks = st.sampled_from(_marks(name))
    said = st.builds(
        lambda word, start, end: word[start % 40 :][: end % 90], marks, *[st.integers(0, 400)] * 2
    )
    prompt, first = data.draw(st.sampled_from(ANSWERS[name]))
    pieces = data.draw(st.lists(marks | said, max_size=8))
    text = data.draw(st.sampled_from(["", first])) + "".join(pieces)
    wanted = judged(name, prompt, text)
    places = data.draw(st.lists(st.integers(0, 10_000), max_size=12))
    assert read(name, prompt, cut(text, places)) == wanted
    assert read(name, prompt, list(text)) == wanted


def test_nothing_begins_behind_the_first_letter_of_a_fixed_form() -> None:
    parser = AnswerParser(READ["qwen3"], once=True)
    said = json.dumps({"a": "<think>no</think> <tool_call>"})
    events = parser.feed(f"<think>hm</think>\n\n{said}<|im_end|>") + parser.finish()
    fields = {event.field.name: event.body for event in events if isinstance(event, Closes)}
    assert fields == {"reasoning_content": "hm", "content": f"\n\n{said}"}
    assert not any(
        isinstance(event, Says) and "think>no" not in event.text and event.field is None
        for event in events[:-1]
    )
