"""Whether a model fits beside others: what these have not touched yet counts, and one GPU holds one model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktcli.assembly import beside
from ktcli.assembly.beside import HeldMemory, fit_beside
from ktcli.assembly.planner import Planner
from ktcli.assembly.ready import Ready
from ktcli.assembly.request import Wanted
from ktcli.assembly.talking import Opening, plan_of, planner_for, prepared
from ktcli.errors import NotEnoughMemory
from ktcli.planner.plan import Request
from ktcli.store.entry import BUILTIN

HOW = Opening(Wanted(512, threads=1), 0, records_heat=False)


@pytest.fixture
def ready() -> Ready:
    return prepared(BUILTIN, HOW)


@pytest.fixture
def need(ready: Ready) -> int:
    return plan_of(ready, HOW).need_bytes


def with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int, device: str = "cpu") -> None:
    """Lets the machine have so much free memory."""

    def made(*given: object) -> Planner:
        planner = planner_for(*given).on(free_bytes)  # type: ignore[arg-type]
        return _OnDevice(*_fields(planner)) if device != "cpu" else planner

    monkeypatch.setattr(beside, "planner_for", made)


def _fields(planner: Planner) -> tuple[object, ...]:
    return planner.model, planner.machine, planner.host, replace(planner.request, device="auto")


class _OnDevice(Planner):
    """Would use a GPU, and plans without one."""

    def place(self, request: Request | None = None) -> object:  # type: ignore[override]
        return super().place(replace(request or self.request, device="cpu"))


def test_what_others_have_not_touched_yet_is_not_free(
    ready: Ready, need: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 2 * need)
    assert fit_beside(ready, HOW, HeldMemory()).fits
    assert fit_beside(ready, HOW, HeldMemory(need, owed_bytes=need)).fits
    found = fit_beside(ready, HOW, HeldMemory(need, owed_bytes=need + 1))
    assert not found.fits and found.free_bytes == need - 1 and found.most_bytes == 2 * need - 1
    found.require_alone("it")  # once the others have gone


def test_what_does_not_fit_alone_says_what_it_needs(
    ready: Ready, need: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, need // 4)
    found = fit_beside(ready, HOW, HeldMemory(need // 4))
    assert not found.fits
    with pytest.raises(NotEnoughMemory, match="it with its context needs"):
        found.require_alone("it")


def test_a_gpu_holds_one_model(ready: Ready, need: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 9 * need, "auto")
    assert fit_beside(ready, HOW, HeldMemory(need)).fits
    assert not fit_beside(ready, HOW, HeldMemory(need, device=True)).fits
    with_free(monkeypatch, 9 * need)
    assert fit_beside(ready, HOW, HeldMemory(need, device=True)).fits
