"""A field that a config leaves out is what transformers' class has there, or the config is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from reference import CASES, Case

from ktcli.errors import BadCheckpoint
from ktcli.models import Model, build, model_types

TEXT = "text_config"
APART = "vision_config", "audio_config", "talker_config", "code2wav_config"
BY_NAME = {case.name: case for case in CASES}


def _alone(name: str, model_type: str, cls: str) -> Case:
    """The text model of a case that sees, as a config of its own."""
    whole = BY_NAME[name]
    return replace(
        whole, name=model_type, model_type=model_type, cls=cls, values=whole.values[TEXT]
    )


ALONE = (
    _alone("qwen3.5-moe", "qwen3_5_moe_text", "Qwen3_5MoeText"),
    _alone("qwen3.5-dense", "qwen3_5_text", "Qwen3_5Text"),
    _alone("step3.7", "step3p5", "Step3p7Text"),
    replace(_alone("ernie4.5-vl", "ernie4_5_moe_vl", "Ernie4_5_VLMoeText"), hub={}),
    replace(BY_NAME["ax-k1"], name="AXK1", model_type="AXK1"),
    # The publisher's names, which transformers lacks.
    *(
        replace(BY_NAME["minimax-m1"], name=name, model_type=name, borrowed=True)
        for name in ("minimax_m1", "minimax_text_01")
    ),
)
EACH = tuple({case.model_type: case for case in reversed((*CASES, *ALONE))}.values())

JUDGED = tuple(case for case in EACH if not case.borrowed)


def test_every_model_type_has_a_case() -> None:
    assert {case.model_type for case in EACH} == set(model_types())


def _paths(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of a config, those of the text model and of rotations too."""
    for name, value in config.items():
        path = (*above, name)
        if name not in ("model_type", *APART):
            if name != TEXT:
                yield path
            if isinstance(value, Mapping) and name not in ("id2label", "label2id"):
                yield from _paths(value, path)


def _without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    made = deepcopy(config)
    inner = made
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return made


def _as_transformers_reads(case: Case, config: dict[str, Any]) -> Model:
    """What is built when transformers has filled in everything that a config leaves out."""
    return build(replace(case, values=deepcopy(config)).own_spelling())


def _said(make: Callable[[], Model]) -> str:
    """How a config is refused; "": it is not."""
    try:
        make()
    except BadCheckpoint as error:
        return str(error)
    return ""


def _fault(case: Case, config: dict[str, Any], name: str) -> str | None:
    """What is wrong with how a config without the field `name` is read."""
    said = _said(lambda: build(config))
    if name in said:
        return None
    try:
        theirs = replace(case, values=deepcopy(config)).own_spelling()
    except (KeyError, ValueError, StrictDataclassError) as error:  # it refuses, and so must kt
        return None if said else f"{name}: transformers says {error}"
    if said:  # of another field, which the same default contradicts
        return None if said == _said(lambda: build(theirs)) else f"{name}: refused, but as {said}"
    return None if build(config) == build(theirs) else f"{name}: another default"


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.model_type)
def test_a_field_left_out_is_as_in_transformers_or_refused(case: Case) -> None:
    full = case.own_spelling()
    assert build(full) == _as_transformers_reads(case, full)
    faults = [_fault(case, _without(full, path), path[-1]) for path in _paths(full)]
    assert [fault for fault in faults if fault] == []


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of the text model, or the whole."""
    for part in ("thinker_config", TEXT):
        config = config.get(part, config)
    return config


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.model_type)
def test_all_that_a_case_does_not_say(case: Case) -> None:
    """Fields are left out together, and lists of layers with those that they follow from."""
    full = case.own_spelling()
    given = {"model_type": full["model_type"], **deepcopy(case.values)}
    inside, given_inside = _text_of(full), _text_of(given)
    for name in [name for name in given_inside if name.endswith("_types")]:
        del given_inside[name]
    while said := _said(lambda: build(given)):
        asked = [name for name in inside if name in said and name not in given_inside]
        assert asked, f"names no field that is left out: {said}"
        given_inside[asked[0]] = inside[asked[0]]
    assert build(given) == _as_transformers_reads(case, given)
