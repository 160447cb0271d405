"""Why torch cannot use a GPU, in one clause."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ktcli.engine.device import usable


class FakeCuda:
    """torch, as `why_not` sees it."""

    def __init__(self, cuda: str | None, available: bool, warning: str = "") -> None:
        import warnings

        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=1)
            return available

        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(is_available=is_available, device_count=lambda: 1)


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeCuda(None, False), "build without CUDA"),
        (FakeCuda("13.0", True), ""),
        (FakeCuda("13.0", False, "CUDA initialization: The NVIDIA driver is too old"), "driver is too old"),
        (FakeCuda("13.0", False, "CUDA initialization: Unexpected error 999"), "Unexpected error 999"),
        (FakeCuda("13.0", False), "torch sees no GPU"),
    ],
)  # fmt: skip
def test_why_torch_cannot(fake: FakeCuda, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable.importlib, "import_module", lambda name: fake)
    reason = usable.why_not()
    assert words in reason and (words or not reason) and "\n" not in reason


def test_torch_is_missing() -> None:
    assert "is not installed" in usable.why_not("no_such_module_of_torch")


def test_nonsense_that_torch_does_not_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES=-, of which torch makes a number."""

    def count() -> int:
        return int("-")

    fake = FakeCuda("13.0", True)
    fake.cuda.device_count = count
    monkeypatch.setattr(usable.importlib, "import_module", lambda name: fake)
    assert "invalid literal" in usable.why_not()
