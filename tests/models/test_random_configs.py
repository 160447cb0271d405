"""One random change of each family's config: refused by name, or computed as transformers does.

The generator runs wide by hand: `python tests/random_configs.py --minutes 10`.
"""

from __future__ import annotations

import random

import pytest
from random_configs import draw, verdict
from reference import ONE_OF_EACH, Case


@pytest.mark.thorough
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.name)
def test_a_changed_config_is_refused_or_equal(case: Case) -> None:
    trial = draw(case, random.Random(case.name))
    said = verdict(trial)
    assert said in ("equal", "refused", "no judge"), f"{trial}\n{said}"
