"""Whatever a data file holds, there are samples that keep their promises, or one sentence."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from samples import models

from ktcli.errors import KtError
from ktcli.resources import data_path
from ktcli.samples.read import read_samples
from ktcli.samples.sample import SampleSet, SampleSettings
from ktcli.samples.shown import document, shown
from ktcli.samples.source import sources_of
from ktcli.text.model import TextModel, read_text_model

_WORDS = [
    "", " ", "a", "two words", "\n\n", "<|end|>", "<|im_end|>\n<|im_start|>assistant\n", "<think>", "</think>x",
    "<think>\nhm\n</think>\n\nyes", "{% generation %}", "{{ x }}", "\ufdd6", "\U0001fffe", "\ud800", "\0", "é😀", "⟦",
    "<|channel|>", '{"name": "f", "arguments": {}}', "[1]", "user", "assistant",
]  # fmt: skip
_texts = st.sampled_from(_WORDS)
_scalars = st.one_of(_texts, st.none(), st.booleans(), st.integers(-3, 3), st.just(float("nan")))
_values = st.recursive(_scalars, lambda each: st.lists(each, max_size=2), max_leaves=4)
_objects = st.dictionaries(_texts, _values, max_size=2)
_roles = st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool", "function"])
_calls = st.lists(
    st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": _texts, "arguments": st.one_of(_texts, _objects)}
            )
        }
    ),
    max_size=2,
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": _roles, "content": _texts},
        optional={"tool_calls": _calls, "weight": st.sampled_from([0, 1]), "reasoning_content": _texts,
            "tool_call_id": _texts, "name": _texts},
    ),
    min_size=2, max_size=6,
)  # fmt: skip
_from = st.sampled_from(["human", "gpt", "gpt", "observation", "system"])
_shared = st.lists(st.fixed_dictionaries({"from": _from, "value": _texts}), min_size=2, max_size=5)
_call = st.just({"from": "function_call", "value": '{"name": "f", "arguments": {}}'})
_tools = st.lists(
    st.fixed_dictionaries({"name": _texts, "parameters": st.one_of(_objects, st.none())}),
    max_size=2,
)
_kinds = [
    st.fixed_dictionaries({"messages": _messages}, optional={"tools": _tools}),
    st.fixed_dictionaries(
        {
            "conversations": st.tuples(_shared, _call, _shared).map(
                lambda each: [*each[0], each[1], *each[2]]
            )
        },
        optional={"tools": _tools, "system": _texts},
    ),
    st.fixed_dictionaries({"instruction": _texts, "output": _texts}, optional={"input": _texts}),
    st.fixed_dictionaries({"prompt": _messages, "completion": _messages}),
    st.fixed_dictionaries({"text": _texts}),
    st.dictionaries(st.sampled_from(["messages", "text", "prompt", "output"]), _values, max_size=3),
]
_files = st.one_of([st.lists(kind, min_size=1, max_size=3) for kind in _kinds])
_settings = st.builds(
    SampleSettings,
    cutoff_len=st.sampled_from([9, 64, 2048, 2048]),
    mask_history=st.booleans(),
    enable_thinking=st.sampled_from([None, False, True]),
    default_system=st.sampled_from([None, "s"]),
)
_NAMES = ("kt-mini", "qwen3", "glm4", "harmony", "mistral", "deepseek-v3.1", "minimax-m2", "llama3")


@cache
def texts_of(name: str) -> TextModel:
    if name == "kt-mini":
        return read_text_model(name, data_path("profiles", name))
    with TemporaryDirectory() as folder:
        return models.family(Path(folder), name)


def read(name: str, data: bytes, how: SampleSettings) -> SampleSet | None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "r.jsonl")
        path.write_bytes(data)
        try:
            return read_samples(sources_of((), None, [path]), texts_of(name), how)
        except KtError as error:
            assert "\n" not in str(error) and len(str(error)) < 2100
            return None


def check(found: SampleSet | None, name: str, how: SampleSettings) -> None:
    for sample in found.samples if found else ():
        assert len(sample.ids) == len(sample.trained) <= how.cutoff_len
        assert any(sample.trained[1:]) and sample.where.startswith("r.jsonl, line ")
    if found:
        json.dumps(document(found, texts_of(name), 9))
        assert "\x1b" not in shown(found, texts_of(name), 9, colour=False)


@settings(max_examples=150)
@given(st.sampled_from(_NAMES), _files, _settings)
def test_any_rows(name: str, rows: list[Any], how: SampleSettings) -> None:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    check(read(name, data, how), name, how)


@settings(max_examples=150)
@given(st.binary(max_size=12), st.integers(0, 200), st.integers(0, 12))
def test_any_bytes(inside: bytes, at: int, without: int) -> None:
    data = (
        b'{"prompt": "a b\\n\\u00e9", "completion": "c"}\n[\n{"prompt": "d", "completion": "e"}\n'
    )
    how = SampleSettings()
    check(read("kt-mini", data[:at] + inside + data[at + without :], how), "kt-mini", how)
