"""What a tokenizer's post-processor puts around a text, read as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import write_tokenizer
from embedders import END, write_pooling

from ktcli.text.around import NOTHING_AROUND, AroundText, read_around
from ktcli.text.model import read_text_model

SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


def token(name: Any) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def template(*single: Any, **ids: Any) -> dict[str, Any]:
    tokens = {name: {"id": name, "ids": each, "tokens": [name]} for name, each in ids.items()}
    return {"type": "TemplateProcessing", "single": list(single), "special_tokens": tokens}


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (None, NOTHING_AROUND),
        ({"type": "ByteLevel"}, NOTHING_AROUND),
        (template(SEQUENCE, token("e"), e=[7]), AroundText((), (7,))),
        (template(token("b"), SEQUENCE, token("e"), b=[1], e=[7, 8]), AroundText((1,), (7, 8))),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(SEQUENCE, token("e"), e=[7])]},
            AroundText((), (7,)),
        ),
        ({"type": "RobertaProcessing", "cls": ["<s>", 0], "sep": ["</s>", 2]}, AroundText((0,), (2,))),
        ({"type": "BertProcessing", "cls": "x", "sep": [1]}, NOTHING_AROUND),
        (template(SEQUENCE, token("x"), e=[7]), NOTHING_AROUND),
        (template(SEQUENCE, token("e"), e=["7"]), NOTHING_AROUND),
        (template(SEQUENCE, token("e"), e=[-1]), NOTHING_AROUND),
        (template(SEQUENCE, token("e"), e=7), NOTHING_AROUND),
        (template(SEQUENCE, token([]), e=[7]), NOTHING_AROUND),
        (template(*[token("e")] * 17, e=[7]), NOTHING_AROUND),
        (template(SEQUENCE, token("e"), e=[7] * 99), AroundText((), (7,) * 16)),
        ({"type": "TemplateProcessing", "single": 3, "special_tokens": {}}, NOTHING_AROUND),
        ({"type": "TemplateProcessing", "single": [], "special_tokens": 3}, NOTHING_AROUND),
        ({"type": "Sequence", "processors": [3, None]}, NOTHING_AROUND),
        (7, NOTHING_AROUND),
    ],
)  # fmt: skip
def test_the_ids_around_a_text(step: Any, found: AroundText) -> None:
    assert read_around({"post_processor": step}) == found


@pytest.mark.parametrize(("flags", "ends"), [({}, 0), ({"add_eos_token": True}, 1)])
def test_without_a_template_the_settings_say_it(
    flags: dict[str, bool], ends: int, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, more=[END], end=END)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "add_bos_token": True, **flags}))
    write_pooling(tmp_path)
    texts = read_text_model("model", tmp_path)
    assert texts.around.before == texts.begin != ()
    assert texts.around.behind == (texts.tokenizer.id_of(END),) * ends
