"""The table of docs/training.md says which families can be trained, as the families' own operations decide it."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference import CASES, UNKNOWN, case_named

from ktcli.errors import UsageError
from ktcli.models import build
from ktcli.training.recorded import missing_part, products_of

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def without_layer(what: str) -> str:
    return what.partition(" in layer ")[0]


@pytest.mark.skipif(bool(UNKNOWN), reason="transformers does not know all families")
def test_the_table_is_that_of_the_families() -> None:
    """One row for each family; a part that only some of its models have is named with them."""
    missing: dict[str, dict[str, str]] = {}
    for case in CASES:
        model = build(case.own_spelling())
        missing.setdefault(model.spec.family, {})[case.name] = without_layer(missing_part(model))
    rows = {family: "; ".join(sorted(set(found.values()))) for family, found in missing.items()}
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    said = {
        family.strip(" `"): text.strip()
        for _, names, text, _ in (line.split("|") for line in lines)
        for family in names.split(",")
    }
    assert said == {family: what or "trained" for family, what in sorted(rows.items())}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "deepseek-v4",
            "family deepseek_v4 yet: this one has hyper-connections",
        ),
        (
            "deepseek-v3.2",
            "family deepseek_v32 yet: this one has a sparse choice of positions in layer 0",
        ),
        ("phi-3.5-moe", "family phimoe yet: this one has a router by SparseMixer in layer 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_its_part(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        products_of(build(case_named(name).own_spelling()))
