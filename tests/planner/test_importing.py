"""Placements of other programs: their expressions, and what they mean as rules."""

import random
import re

import pytest
from shapes import shape

from ktcli.planner.expressions import Expression, NotAnExpression
from ktcli.planner.importing import MODULES, TENSORS, ForeignPattern, device_place, translate
from ktcli.planner.partnames import PartNames
from ktcli.planner.rules import RulePlace

CUDA0, CUDA1, CPU = RulePlace("cuda", 0), RulePlace("cuda", 1), RulePlace("cpu")


def random_expression(draw: random.Random, depth: int = 3) -> str:
    kind = draw.randrange(8 if depth else 4)
    if kind < 3:
        return draw.choice(["a", "b", r"\.", ".", "[ab]", "[^a]", "[0-9]", r"\d"])
    if kind == 3:
        return draw.choice(["^", "$", "a", "b"])
    inner = random_expression(draw, depth - 1)
    if kind == 4:
        return f"({inner}|{random_expression(draw, depth - 1)})"
    if kind == 5:
        return f"({inner}){draw.choice('*+?')}"
    if kind == 6:
        return f"(?{draw.choice('!=:')}{inner})"
    return inner + random_expression(draw, depth - 1)


def test_expressions_find_what_re_finds():
    draw = random.Random(1)
    words = ["".join(draw.choices("ab.1", k=n)) for n in range(7) for _ in range(6)]
    for _ in range(3000):
        text = "".join(random_expression(draw) for _ in range(draw.randint(1, 3)))
        own, judge = Expression.parse(text), re.compile(text)
        assert [own.occurs(w) for w in words] == [judge.search(w) is not None for w in words], text


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(a|a)*b", "(.*)*(.*)*x", "((a*)*)*b", "(?=.*" * 8 + "z" + ")" * 8]
)
def test_what_goes_back_for_ever_elsewhere_ends_at_once(text: str):
    assert not Expression.parse(text).occurs("a" * 200 + "!")


@pytest.mark.parametrize(
    "text", ["(", "[", "a{1,2}", "*", "a**", "a\\", r"\b", "(?<x>a)", "(?P=x)", "(" * 50 + ")" * 50, "a" * 2000]
)  # fmt: skip
def test_what_is_no_expression_here_is_said(text: str):
    with pytest.raises(NotAnExpression):
        Expression.parse(text)


def rules(found) -> list[tuple[str, str]]:
    return [(rule.match, rule.place.text) for rule in found.rules.each]


def test_overrides_of_llama_cpp():
    patterns = [
        ForeignPattern(r"blk\.(3|4|5)\.ffn_.*_exps\.", CUDA0),
        ForeignPattern(r"blk\.([6-9]|1[0-9])\.ffn_(up|gate|down)_exps.", CUDA1),
        ForeignPattern(r"blk\.20\.ffn_up_exps", CUDA0),
        ForeignPattern("exps", CPU),
        ForeignPattern("output", None, why="Vulkan0 is not a place of kt"),
    ]
    found = translate(patterns, TENSORS)
    assert rules(found) == [
        ("layers.3-5.experts", "cuda:0"), ("layers.6-19.experts", "cuda:1"), ("layers.*.experts", "cpu"),
    ]  # fmt: skip
    assert [each.split(":")[0] for each in found.left] == [r"blk\.20\.ffn_up_exps", "output"]
    named = translate(patterns, TENSORS, PartNames.of(shape("deepseek-v3")))
    assert rules(named)[-1] == ("layers.21-60.experts", "cpu")


def test_layers_without_an_end_need_a_model():
    patterns = [ForeignPattern(r"blk\.([3-9][0-9]|1[0-9][0-9])\.", CUDA1)]
    assert "--model would tell" in translate(patterns, TENSORS).left[0]
    named = translate(patterns, TENSORS, PartNames.of(shape("qwen3-30b-a3b")))
    assert rules(named) == [("layers.30-47", "cuda:1")] and not named.left


def test_what_an_earlier_pattern_has_without_a_place_goes_nowhere():
    patterns = [ForeignPattern("exps", None, why="no place"), ForeignPattern("blk", CPU)]
    assert ("layers.*.experts", "cpu") not in rules(translate(patterns, TENSORS))


def test_modules_of_an_injection_file():
    patterns = [
        ForeignPattern(
            r"^model\.layers\.(0|[1-9]|[12][0-9])\.(?!self_attn\.kv_b_proj).*$",
            CUDA0,
            ("attention",),
        ),
        ForeignPattern(r"^model\.layers\..*\.mlp\.experts$", CPU),
        ForeignPattern("^lm_head", CUDA1),
    ]
    assert rules(translate(patterns, MODULES)) == [
        ("layers.0-29.attention", "cuda:0"), ("layers.*.experts", "cpu"), ("output_head", "cuda:1"),
    ]  # fmt: skip


def test_names_of_devices():
    known = {"cuda": CUDA0, "cuda:1": CUDA1, "CUDA1": CUDA1, "cpu": CPU, "CPU": CPU}
    assert {name: device_place(name) for name in known} == known
    assert [
        device_place(each) for each in ("meta", "CUDA_Host", "RPC[1]", "cuda:x", "cuda:²", "")
    ] == [None] * 6
