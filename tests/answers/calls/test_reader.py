"""Calls of tools in every style: what the makers document, any cut of it, what their templates render, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text import family_templates

from ktcli.answers.calls.reader import CallReader
from ktcli.answers.calls.styles import STYLES, style_of
from ktcli.answers.calls.values import Tools
from ktcli.answers.events import CallArguments, CallBegins, CallEnds
from ktcli.text.template import ChatTemplate

BY_NAME = {row.name: row for row in STYLES}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "zip": {"type": "string"},
                "exact": {"type": "boolean"},
                "at": {"type": ["object", "null"]},
            },
        },
    },
}
TOOLS = Tools.of([WEATHER])
PARIS = {"city": 'Paris, "the" <b>', "days": 3, "zip": "07", "exact": True, "at": {"hour": [1, 2]}}
ONE = {"city": "Rome"}
SAID = "I will look.\n\nIt takes a moment."

# Each style as its makers document it: the text of a call of PARIS and one of ONE.
_QWEN = "\n".join(
    f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': each})}\n</tool_call>"
    for each in (PARIS, ONE)
)
_J = [json.dumps(PARIS), json.dumps(ONE)]


def _pairs(lead: str, mid: str, end: str, each: dict[str, Any]) -> str:
    texts = (v if isinstance(v, str) else json.dumps(v) for v in each.values())
    return "".join(f"{lead}{k}{mid}{v}{end}" for k, v in zip(each, texts, strict=True))


def _dsml(outer: str) -> str:
    calls = ""
    for each in (PARIS, ONE):
        calls += '<｜DSML｜invoke name="get_weather">\n'
        for k, v in each.items():
            is_text = "true" if isinstance(v, str) else "false"
            said = v if isinstance(v, str) else json.dumps(v)
            calls += (
                f'<｜DSML｜parameter name="{k}" string="{is_text}">{said}</｜DSML｜parameter>\n'
            )
        calls += "</｜DSML｜invoke>\n"
    return f"<｜DSML｜{outer}>\n{calls}</｜DSML｜{outer}>"


def _python(each: dict[str, Any]) -> str:
    return f"get_weather({', '.join(f'{key}={value!r}' for key, value in each.items())})"


_M3 = "]<]minimax[>["  # before each tag
CALLS = {
    "kimi-k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.get_weather:{i}<|tool_call_argument_begin|>{j}<|tool_call_end|>"
        for i, j in enumerate(_J)
    )
    + "<|tool_calls_section_end|>",
    "deepseek-v4": _dsml("tool_calls"),
    "deepseek-v3.2": _dsml("function_calls"),
    "deepseek-v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{j}\n```<｜tool▁call▁end｜>"
        for j in _J
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>"
    + "".join(f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{j}<｜tool▁call▁end｜>" for j in _J)
    + "<｜tool▁calls▁end｜>",
    "minimax-m2": "<minimax:tool_call>\n"
    + "".join(
        '<invoke name="get_weather">\n'
        + _pairs('<parameter name="', '">', "</parameter>\n", each)
        + "</invoke>\n"
        for each in (PARIS, ONE)
    )
    + "</minimax:tool_call>",
    "minimax-m3": f"{_M3}<tool_call>\n"
    + "".join(
        f'{_M3}<invoke name="get_weather">'
        + "".join(
            f"{_M3}<{k}>{v if isinstance(v, str) else json.dumps(v)}{_M3}</{k}>"
            for k, v in each.items()
        )
        + f"{_M3}</invoke>\n"
        for each in (PARIS, ONE)
    )
    + f"{_M3}</tool_call>",
    "step-3": "<｜tool_calls_begin｜>\n"
    + "\n".join(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        + _pairs('<steptml:parameter name="', '">', "</steptml:parameter>\n", each)
        + "</steptml:invoke><｜tool_call_end｜>"
        for each in (PARIS, ONE)
    )
    + "\n<｜tool_calls_end｜>",
    "glm-4.5": "\n".join(
        "<tool_call>get_weather\n"
        + _pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", each)
        + "</tool_call>"
        for each in (PARIS, ONE)
    ),
    "qwen3-coder": "\n".join(
        "<tool_call>\n<function=get_weather>\n"
        + _pairs("<parameter=", ">\n", "\n</parameter>\n", each)
        + "</function>\n</tool_call>"
        for each in (PARIS, ONE)
    ),
    "hunyuan": "<tool_calls>\n"
    + "\n".join(f"<tool_call>get_weather\n```json\n{j}\n```</tool_call>" for j in _J)
    + "\n</tool_calls>",
    "mistral-3": "".join(f"[TOOL_CALLS]get_weather[ARGS]{j}" for j in _J),
    "mistral": "[TOOL_CALLS] "
    + json.dumps([{"name": "get_weather", "arguments": each} for each in (PARIS, ONE)]),
    "granite-3": "<|tool_call|>"
    + json.dumps([{"name": "get_weather", "arguments": each} for each in (PARIS, ONE)]),
    "lfm-2.5": f"<|tool_call_start|>[{', '.join(map(_python, (PARIS, ONE)))}]<|tool_call_end|>",
    "command": "<|START_ACTION|>[\n"
    + ",\n".join(
        json.dumps({"tool_call_id": str(i), "tool_name": "get_weather", "parameters": each})
        for i, each in enumerate((PARIS, ONE))
    )
    + "\n]<|END_ACTION|>",
    "qwen3": _QWEN,
}
EXPECTED = [("get_weather", PARIS), ("get_weather", ONE)]


def read(style: str, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls that pieces of an answer say; the order of events is checked."""
    reader = CallReader(BY_NAME[style], TOOLS)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    text, calls, arguments = "", [], None
    for event in events:
        if isinstance(event, str):
            assert event and arguments is None
            text += event
        elif isinstance(event, CallBegins):
            assert arguments is None and event.number == len(calls)
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            assert arguments is not None
            arguments += event.text
        elif isinstance(event, CallEnds):
            assert arguments is not None
            calls.append((name, json.loads(arguments)))
            arguments = None
    assert arguments is None
    return text, calls


@pytest.mark.parametrize("style", CALLS)
@pytest.mark.parametrize("said", ["", SAID])
def test_calls_are_read_as_documented(style: str, said: str) -> None:
    assert read(style, [f"{said}\n\n{CALLS[style]}"]) == (said, EXPECTED)
    assert read(style, list(f"{said}\n\n{CALLS[style]}\n")) == (said, EXPECTED)


@pytest.mark.in_turn("style")
@pytest.mark.parametrize("style", CALLS)
@given(data=st.data())
@settings(max_examples=20)
def test_any_cut_gives_the_same(style: str, data: st.DataObject) -> None:
    text, pieces = SAID + CALLS[style], []
    while text:
        n = data.draw(st.integers(1, len(text)))
        pieces.append(text[:n])
        text = text[n:]
    assert read(style, pieces) == (SAID, EXPECTED)


@pytest.mark.parametrize("style", STYLES, ids=lambda row: row.name)
@given(data=st.data())
@settings(max_examples=30)
def test_nonsense_is_no_error_and_does_not_depend_on_its_cut(
    style: Any, data: st.DataObject
) -> None:
    parts = [*style.marks, "get_weather", "{", "}", '"', "\\", "[", "a", "\n", '"name": "x"', " "]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    outcomes = []
    for pieces in ([text], list(text)):
        reader = CallReader(style, TOOLS)
        events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
        said = "".join(event for event in events if isinstance(event, str))
        begun = [event[1:] for event in events if isinstance(event, CallBegins)]
        arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
        outcomes.append((said, begun, arguments))
        if not any(mark in text for mark in style.marks) and not style.bare:
            assert said == text.rstrip()
    assert outcomes[0] == outcomes[1]


def test_an_object_is_a_call_of_llama_at_the_beginning_only() -> None:
    call = json.dumps({"name": "get_weather", "parameters": ONE})
    assert read("llama-3", [call]) == ("", [("get_weather", ONE)])
    assert read("llama-3", list(f"<|python_tag|>{call}")) == ("", [("get_weather", ONE)])
    assert read("llama-3", [f"Say {call}"]) == (f"Say {call}", [])
    assert read("llama-3", list('{"a": 1} is JSON')) == ('{"a": 1} is JSON', [])


@pytest.mark.parametrize(
    ("answer", "text", "n"),
    [
        # As the template has past calls, as the makers' guide has them, and between the marks.
        (
            f'<|python_start|>Hm.<|python_end|>{{"name": "get_weather", "parameters": {_J[1]}}}',
            "Hm.",
            1,
        ),
        (f'{{"name": "get_weather", "parameters": {_J[1]}}}' * 2, "", 2),
        (f"[{_python(ONE)}, {_python(ONE)}]", "", 2),
        (f"<|python_start|>[{_python(ONE)}]<|python_end|>", "", 1),
        ("[1, 2] is a list of f(x=y)", "[1, 2] is a list of f(x=y)", 0),
        ("[f(x=y)]", "[f(x=y)]", 0),
    ],
)
def test_calls_of_llama_4_are_objects_or_python(answer: str, text: str, n: int) -> None:
    for size in (len(answer), 3, 1):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert read("llama-4", pieces) == (text, n * [("get_weather", ONE)])


def test_published_templates_are_told_apart() -> None:
    """By what llama.cpp's copies of them have."""
    assert style_of("<|channel|>commentary functions.") is STYLES[0]
    for source, name in (
        ("<|header_start|>ipython <|python_start|>", "llama-4"),
        ("<|start_header_id|>ipython", "llama-3"),
        ("<|tool_list_start|>[ <|tool_response_start|>", "lfm-2"),
        ('<|START_ACTION|>[ "tool_name": ', "command"),
    ):
        style = style_of(source)
        assert style is not None and style.name == name


def test_values_have_the_types_of_the_schema() -> None:
    said = {"city": "7", "days": "7", "zip": "007", "exact": "True", "at": "null"}
    values = {key: TOOLS.value("get_weather", key, text) for key, text in said.items()}
    assert values == {"city": "7", "days": 7, "zip": "007", "exact": True, "at": None}
    assert TOOLS.value("get_weather", "days", "many") == "many"
    assert TOOLS.value("unknown", "key", "[1]") == [1]
    assert TOOLS.value("unknown", "key", "[" * 10_000) == "[" * 10_000


TEMPLATES = {
    "KIMI_K2": "kimi-k2",
    "DEEPSEEK_V3_1": "deepseek-v3.1",
    "QWEN3_TOOLS": "qwen3",
    "GLM4": "glm-4.5",
    "MINIMAX_M2": "minimax-m2",
    "MISTRAL_TOOLS": "mistral",
    "LLAMA3": "llama-3",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_is_read_back(name: str) -> None:
    source = getattr(family_templates, name)
    style = style_of(source)
    assert style is not None and style.name == TEMPLATES[name]
    template = ChatTemplate(source, name=name, tokens={"bos_token": "<s>", "eos_token": "</s>"})
    call = {
        "id": "functions.get_weather:0" if name == "KIMI_K2" else "abcdefghi",
        "type": "function",
    }
    call["function"] = {"name": "get_weather", "arguments": PARIS}  # type: ignore[assignment]
    question = [{"role": "user", "content": "And?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = template.render(question, add_generation_prompt=False, tools=[WEATHER])
    whole = template.render([*question, answer], add_generation_prompt=False, tools=[WEATHER])
    rendered = whole[len(asked) :].replace("</s>", "")
    rendered = rendered.removeprefix("<|start_header_id|>assistant<|end_header_id|>\n\n")
    _, calls = read(style.name, list(rendered.replace("<|eot_id|>", "")))
    assert calls == [("get_weather", PARIS)]


# Calls as models write them where they are not quite as documented: the text, the calls, what is left to say.
_PAIR = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
NEARLY = {
    "a section closed that was never opened": (
        "qwen3-coder", f"Look.\n{_PAIR}\n</tool_call>", "Look.", [("get_weather", ONE)],
    ),
    "a closing mark of its own stays": ("qwen3-coder", "a </tool_call> b", "a </tool_call> b", []),
    "a section misspelt": (
        "kimi-k2",
        "<|tool_call_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_J[1]}<|tool_call_end|><|tool_call_section_end|>",
        "", [("get_weather", ONE)],
    ),
    "in a fence": (
        "qwen3",
        f'<tool_call>\n```json\n{{"name": "get_weather", "arguments": {_J[1]}}}\n```\n</tool_call>',
        "", [("get_weather", ONE)],
    ),
    "in a fence without a name": (
        "qwen3",
        f'<tool_call>\n```\n{{"arguments": {_J[1]}, "name": "get_weather"}}\n```\n</tool_call>Done',
        "Done", [("get_weather", ONE)],
    ),
    "no arguments": (
        "qwen3", '<tool_call>{"name": "get_weather", "arguments": null}</tool_call>',
        "", [("get_weather", {})],
    ),
    "other quotation marks": (
        "minimax-m2",
        "<minimax:tool_call>\n<invoke name='get_weather'>\n<parameter name='city'>Rome</parameter>\n</invoke>\n"
        "</minimax:tool_call>",
        "", [("get_weather", ONE)],
    ),
    "Python's literals": (
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=at>\n{'hour': (1, 2)}\n"
        "</parameter>\n<parameter=city>\n['a']\n</parameter>\n</function>\n</tool_call>",
        "", [("get_weather", {"exact": True, "at": {"hour": [1, 2]}, "city": "['a']"})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEARLY)
def test_calls_nearly_as_documented_are_read(case: str) -> None:
    style, answer, text, calls = NEARLY[case]
    for size in (len(answer), 3, 1):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert read(style, pieces) == (text, calls)


def test_whole_calls_in_a_text_are_found_without_what_stands_around_them() -> None:
    reader = CallReader(BY_NAME["qwen3"], TOOLS)
    call = f'<tool_call>{{"name": "get_weather", "arguments": {_J[1]}}}</tool_call>'
    found = reader.whole_calls_in(f"I could {call} now, or <tool_call>{{cut")
    assert [type(each) for each in found] == [CallBegins, CallArguments, CallEnds]
    assert reader.calls == 1
