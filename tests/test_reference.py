"""The judge on a machine whose transformers is older: families that it does not know are left out, nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import transformers
from families.case import Case


def test_the_transformers_that_is_pinned_knows_all_families() -> None:
    pinned = f"transformers=={transformers.__version__}"
    if pinned not in Path(__file__).parent.with_name("constraints.txt").read_text().split():
        pytest.skip(f"{pinned} is not; it does not know {reference.UNKNOWN}")
    assert reference.UNKNOWN == ()


def test_a_family_that_transformers_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def importing(name: str) -> SimpleNamespace:
        if name.endswith("new"):
            raise ImportError("cannot import name 'NewForCausalLM'", name="transformers")
        if name.endswith("broken"):
            raise ImportError("no module 'caze'", name="caze")
        return SimpleNamespace(CASES=[Case("a", "a", "Qwen3Moe"), Case("b", "b", "NotYetThere")])

    monkeypatch.setattr(reference, "import_module", importing)
    assert reference.known("new") == ()
    assert [case.name for case in reference.known("old")] == ["a"]
    with pytest.raises(ImportError, match="caze"):
        reference.known("broken")
    with pytest.raises(pytest.skip.Exception, match="does not know"):
        reference.case_named("no-such-case")
