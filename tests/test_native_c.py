"""The C tests, under the sanitizers: each native/tests/test_*.c once with addresses and undefined behaviour, and once
with data races watched (sanitized.py builds and runs them beside the other tests)."""

import pytest
import sanitized

pytestmark = pytest.mark.thorough

# Data races need threads: a file that makes no pool is not run under the thread sanitizer; of the others half, in turn.
CASES = [
    pytest.param(
        name,
        source.stem,
        id=f"{name}-{source.stem}",
        marks=[pytest.mark.rotates(2)] * (name == "thread"),
    )
    for name in sanitized.SANITIZERS
    for source in sorted(sanitized.NATIVE.glob("tests/test_*.c"))
    if name != "thread"
    or "make_pool" in source.read_text()
    or "kt_pool_create" in source.read_text()
]


@pytest.mark.parametrize(("sanitizer", "source"), CASES)
def test_native(request: pytest.FixtureRequest, sanitizer: str, source: str) -> None:
    code, said = sanitized.result(request.config, sanitizer, source)
    if code == sanitized.SKIPPED:
        pytest.skip(said.strip().splitlines()[-1])
    assert code == 0, said
