"""What is told of answers that a template reads: texts, thoughts and calls, in any pieces what transformers finds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from answers.answer_templates import ANSWERS, TEMPLATES
from chat.fake_engine import TEMPLATE, VOCAB, backend, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from ktcli.answers.calls.styles import STYLES, style_of
from ktcli.answers.calls.values import Tools
from ktcli.answers.events import AnswerPiece, CallArguments, CallBegins, CallEnds
from ktcli.answers.format import AnswerFormat
from ktcli.answers.grammar.calls import WantedCalls
from ktcli.answers.grammar.compiler import GrammarCompiler
from ktcli.answers.grammar.form import Form
from ktcli.answers.grammar.whole import Shape
from ktcli.answers.templates.answers import Answers
from ktcli.answers.templates.parser import AnswerParser
from ktcli.answers.templates.reading import Telling
from ktcli.answers.templates.template import read_template
from ktcli.chat.chat import Chat
from ktcli.text.model import read_text_model
from ktcli.text.tokenizer import load_tokenizer

KNOWN = {"qwen3": "<tool_call>", "qwen3.5": "<function= <parameter=", "glm-4.5": "<arg_key>"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    return {
        name: Answers.of(read_template(value), tokenizer, (), style_of(KNOWN.get(name, "")))
        for name, value in TEMPLATES.items()
    }


def told(answers: Answers, prompt: str, pieces: list[str]) -> tuple[dict[str, Any], int]:
    """The message that the events make, as transformers writes it, and the number of pieces of arguments."""
    parser, telling = AnswerParser(answers.template), Telling(answers, Tools())
    parser.prime(prompt)
    added = [telling.tell(parser.feed(piece)) for piece in pieces]
    added.append(telling.tell(parser.finish()))
    found = [each for one in added for each in one.events]
    texts = {
        thought: "".join(x.text for x in found if isinstance(x, AnswerPiece) and x.thought is thought)
        for thought in (True, False)
    }  # fmt: skip
    names = [each.name for each in found if isinstance(each, CallBegins)]
    begun = [each.number for each in found if isinstance(each, CallBegins)]
    ended = [each.number for each in found if isinstance(each, CallEnds)]
    assert begun == ended == list(range(telling.calls))
    arguments = [""] * len(names)
    for each in found:
        if isinstance(each, CallArguments):
            arguments[each.number] += each.text
    calls = [(name, json.loads(said)) for name, said in zip(names, arguments, strict=True)]
    said = sum(isinstance(each, CallArguments) for each in found)
    return {"thought": texts[True], "text": texts[False], "calls": calls}, said


def judged(name: str, prompt: str, text: str) -> dict[str, Any]:
    from transformers.utils.chat_parsing import parse_response

    found = parse_response(text, TEMPLATES[name], prefix=prompt)
    calls = [call["function"] for call in found.get("tool_calls", [])]
    thoughts = [found.get(key) or "" for key in ("reasoning_content", "thinking")]
    return {
        "thought": "".join(thoughts),
        "text": found.get("content") or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
    }


CASES = [(name, *each) for name, rows in ANSWERS.items() for each in rows]


@pytest.mark.parametrize(("name", "prompt", "text"), CASES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_split_tells_the_same(
    answers: dict[str, Answers], name: str, prompt: str, text: str, data: st.DataObject
) -> None:
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    wanted = judged(name, prompt, text)
    wanted["thought"] = wanted["thought"].removeprefix("<think>\n")  # of the prompt
    assert told(answers[name], prompt, pieces)[0] == wanted


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5"])
def test_arguments_come_before_a_call_ends(answers: dict[str, Answers], name: str) -> None:
    prompt, text = next(each for each in ANSWERS[name] if "get_weather" in each[1])
    assert told(answers[name], prompt, list(text))[1] > 2


def test_calls_are_held_to_what_the_template_reads(answers: dict[str, Answers]) -> None:
    styles = {name: each.style and each.style.name for name, each in answers.items()}
    assert styles["qwen3"] == "qwen3" and styles["qwen3.5"] == "qwen3-coder"
    assert styles["glm-4.5"] is None or styles["glm-4.5"] == "glm-4.5"
    assert styles["smollm"] == "its template"
    assert not any(styles[name] for name in ("cohere", "gemma-4", "inkling", "lines", "llama-3"))
    other = style_of("<|tool_call_argument_begin|>")
    assert other in STYLES
    template = answers["qwen3"].template
    assert Answers.of(template, speaker_tokenizer(), (), other).style is not other


def speaker_tokenizer() -> Any:
    class Empty:
        added = ()

    return Empty()


def test_a_pair_that_means_nothing_ends_the_arguments(answers: dict[str, Answers]) -> None:
    value = json.loads(json.dumps(TEMPLATES["qwen3.5"]))
    value["fields"]["tool_calls"]["content_args"]["value_parser"] = {"name": "json"}
    made = Answers(read_template(value))
    said = "".join(
        f"<parameter={key}>{text}</parameter>" for key, text in (("a", "1"), ("b", "x"), ("c", "2"))
    )
    call = f"<tool_call><function=f>{said}</function></tool_call> so"
    found, _ = told(made, "", list(call))
    assert found == {"thought": "", "text": "so", "calls": [("f", {"a": 1})]}


# --- grammars and chats -----------------------------------------------------------------------------

_MARKS = {
    "cohere": tuple(
        f"<|{edge}_{part}|>" for edge in ("START", "END") for part in ("RESPONSE", "THINKING", "ACTION")
    ),
    "gemma-4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    "smollm": (),
}  # fmt: skip
_FORMS = [
    ("cohere", '<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>{"a":1}<|END_RESPONSE|>', True),
    ("cohere", '<|START_RESPONSE|>{"a":1}<|END_RESPONSE|>', True),
    ("cohere", '{"a":1}', False),
    ("gemma-4", '<|channel>thought\nhm<channel|>{"a":1}', True),
    ("gemma-4", '<|channel>answer\nhm<channel|>{"a":1}', False),
    ("smollm", '<think>\nhm\n</think>\n\n{"a":1}', True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "said", "fits"), _FORMS)
def test_a_form_stands_between_the_marks_of_its_template(
    tmp_path: Path, name: str, said: str, fits: bool
) -> None:
    template = {**TEMPLATES[name], "start_anchor": "<|assistant|>"}
    write_tokenizer(tmp_path, more=_MARKS[name], answers=template)
    (tmp_path / "generation_config.json").write_text("{}")
    texts = read_text_model("x", tmp_path)
    answers = AnswerFormat.of(texts)
    compiler = GrammarCompiler.of(answers, VOCAB)
    held = compiler.constraints(
        Shape(Form.of_object("f")), answers.calls, "<|user|>x<|assistant|>"
    )[0]
    for id in texts.tokenizer.encode(said):
        held.take(id)
    assert (held.error is None) is fits
    compiler.close()


def test_required_calls_of_a_template_of_its_own(tmp_path: Path) -> None:
    template = json.loads(json.dumps(TEMPLATES["smollm"]).replace("tool_call>", "do>"))
    template["start_anchor"] = "<|assistant|>"
    write_tokenizer(tmp_path, answers=template)
    (tmp_path / "generation_config.json").write_text("{}")
    texts = read_text_model("x", tmp_path)
    answers = AnswerFormat.of(texts)
    assert answers.may_call and answers.calls is not None and style_of(TEMPLATE) is None
    compiler = GrammarCompiler.of(answers, VOCAB)
    shape = Shape(
        None, WantedCalls(Tools({"f": {"properties": {"a": {"type": "integer"}}}}), False, "t")
    )
    for said, fits in (('{"name": "f", "arguments": {"a": 1}}', True), ('{"name": "g"', False)):
        held = compiler.constraints(shape, answers.calls, "<|assistant|>")[0]
        for id in texts.tokenizer.encode(f"<do>\n{said}"):
            held.take(id)
        assert (held.error is None) is fits
    compiler.close()


def test_a_thought_ends_with_its_budget_as_the_template_says(tmp_path: Path) -> None:
    template = {**TEMPLATES["cohere"], "start_anchor": "<|assistant|>"}
    said = "<|START_THINKING|>hm hm hm hm"
    chat = Chat(backend(tmp_path, lambda question: said, more=_MARKS["cohere"], answers=template))
    chat.settings = replace(chat.settings, think_budget=3)
    pieces = list(chat.ask("well?"))
    assert any(piece.thought for piece in pieces)
    assert chat.reply.thought_cut
    closed = chat.backend.texts.tokenizer.id_of("<|END_THINKING|>")
    assert closed in chat.reply.ids
