"""What is counted follows from what the layers declare, never from names, and stays what it was.

The figures of every family's configurations lie in tests/data/planner_figures.json, written by
`PYTHONPATH=tests python tests/planner/test_declared.py`: a change that moves one shows there what it moves.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from reference import CASES, Case

import ktcli
from ktcli.models import Model, build
from ktcli.ops.part import Access, ModelPart
from ktcli.ops.passes import reuse_buffers
from ktcli.ops.recording import record
from ktcli.ops.tensors import Role
from ktcli.planner.device import DeviceSizes
from ktcli.planner.memory import scratch_bytes
from ktcli.planner.spec import StepShape, parts, step_work
from ktcli.planner.stack import stack_of
from ktcli.weights.recipe import Recipe

PACKAGE = Path(ktcli.__file__).parent
FIGURES = Path(__file__).parents[1] / "data" / "planner_figures.json"
STEPS = {
    "decode": StepShape(1, 100),
    "prefill": StepShape(512, 64),
    "outputs": StepShape(3, 1000, 3),
}


def figures(model: Model) -> dict[str, Any]:
    """Bytes and operations by part; scratch on the CPU, and per token on a GPU; bytes that always lie there."""
    recipe = Recipe()
    works = {
        name: {w.part.value: [w.read_bytes, w.ops] for w in step_work(model, recipe, step)}
        for name, step in STEPS.items()
    }
    return {
        "parts": {each.part.value: each.size_bytes for each in parts(model, recipe)},
        **works,
        "scratch": scratch_bytes(model),
        "device": [
            DeviceSizes.of(model.spec, stack_of(model, recipe)).token_bytes,
            int(stack_of(model, recipe).near_bytes.sum()),
        ],
    }


RECORDED: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in RECORDED], ids=lambda case: case.name
)
def test_figures_are_those_recorded(case: Case):
    assert figures(build(case.own_spelling())) == RECORDED[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_declarations_agree_with_roles(case: Case):
    """What a tensor's format says of its use is no other than what its part and its access say."""
    for tensor in build(case.own_spelling()).tensors:
        experts = tensor.role is Role.EXPERTS
        assert experts == (tensor.part is ModelPart.EXPERTS), tensor.name
        assert (tensor.role is Role.TABLE) == (tensor.part is ModelPart.EMBEDDING), tensor.name
        assert (tensor.role is Role.VECTOR) == (tensor.part is ModelPart.VECTORS), tensor.name
        chosen = experts or (tensor.role is Role.VECTOR and tensor.count > 1)
        assert chosen == (tensor.access is Access.CHOSEN), tensor.name
        looked_up = tensor.role is Role.TABLE or tensor.below > 0
        assert looked_up == (tensor.access is Access.ROWS), tensor.name
        outside = tensor.layer is None and tensor.role in (Role.DENSE, Role.KEPT)
        assert outside == (tensor.access is Access.OUTPUTS), tensor.name
        assert tensor.neutral == 1.0 or tensor.role is Role.VECTOR, tensor.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_layers_use_the_buffers_of_one_of_each_kind(case: Case):
    model = build(case.own_spelling())
    whole = reuse_buffers(record(model.forward)).buffers
    assert sorted(model.buffers) == sorted(whole)


# --- no name decides ------------------------------------------------------------------------------

# What counts, places, loads and formats tensors.
DECIDING = [
    *(path for part in ("planner", "engine", "measure") for path in (PACKAGE / part).rglob("*.py")),
    PACKAGE / "weights" / "recipe.py",
    PACKAGE / "weights" / "pack.py",
]
# Names there are those of a profiler's records and of files.
OTHER_NAMES = {
    "measure/device_trace.py": ("record.name", "device_type().name"),
    "weights/pack.py": ("record.name",),
}
TESTS_OF_TEXT = {
    "startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split",
    "rsplit", "find", "index", "count", "replace",
}  # fmt: skip


def named(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "name"


def asks_a_name(node: ast.AST) -> bool:
    """`x.name.endswith(…)`, `"…" in x.name`, `x.name == "…"`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in TESTS_OF_TEXT and named(node.func.value)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        text = any(isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides)
        return text and any(map(named, sides))
    return False


@pytest.mark.parametrize("path", DECIDING, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_decision_asks_a_tensors_name(path: Path):
    others = OTHER_NAMES.get(path.relative_to(PACKAGE).as_posix(), ())
    found = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if asks_a_name(node) and not any(other in ast.unparse(node) for other in others)
    ]
    assert found == [], "a tensor says by its part, role and access what it is"


@pytest.mark.parametrize(
    "text",
    ['t.name.endswith(".uv")', '"mix" in t.name', 't.name == "x"', 't.name.split(".")[2]'],
)
def test_the_search_finds_what_it_is_for(text: str):
    assert any(asks_a_name(node) for node in ast.walk(ast.parse(text)))


if __name__ == "__main__":
    lines = (f"{json.dumps(c.name)}: {json.dumps(figures(build(c.own_spelling())))}" for c in CASES)
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
