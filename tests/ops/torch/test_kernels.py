"""Every table of kernels is complete, and each kernel takes what its row of the table of operations has."""

from __future__ import annotations

import subprocess
from inspect import signature
from pathlib import Path

import pytest
import torch
from optable import FORWARD

from ktcli.ops.operation import layout_of
from ktcli.ops.table.experts import Experts
from ktcli.ops.table.rowwise import Embed, Select
from ktcli.ops.torch import kernels as module
from ktcli.ops.torch.kernels import EXACT, TORCH, Kernels, kernels_for, triton_kernels


@pytest.mark.thorough
@pytest.mark.parametrize(
    "error",
    [RuntimeError("fatal error: Python.h: no such file\nmore"), OSError("libcuda.so"), None],
)
def test_a_gpu_on_which_triton_fails_runs_torch(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are tried once."""
    pytest.importorskip("triton", reason="needs triton")
    tried = []

    def run(device: torch.device) -> None:
        tried.append(device)
        if error is not None:
            raise error

    monkeypatch.setattr(module, "_triton_lacks", str)
    monkeypatch.setattr(module, "_run_kernels", run)
    module.triton_fails.cache_clear()
    gpu = torch.device("cuda", 0)
    assert [kernels_for(gpu).name for _ in range(2)] == ["torch" if error else "triton"] * 2
    said = module.triton_fails(gpu)
    assert tried == [gpu] and "\n" not in said and bool(said) == bool(error)
    module.triton_fails.cache_clear()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("capability", "early"), [((8, 9), False), ((9, 0), True), ((12, 0), True)]
)
def test_kernels_start_early_where_they_can_and_late_where_that_fails(
    capability: tuple[int, int], early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from ktcli.ops.triton import early as starts

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(starts, "_of_devices", {})
    monkeypatch.setattr(module, "_late", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    assert starts.starts_early(gpu) == early
    assert not starts.starts_early(torch.device("cpu"))

    def run(device: torch.device) -> None:
        if starts.starts_early(device):
            raise RuntimeError("invalid attribute\nmore")

    monkeypatch.setattr(module, "_triton_lacks", str)
    monkeypatch.setattr(module, "_run_kernels", run)
    module.triton_fails.cache_clear()
    assert module.triton_fails(gpu) == ""
    assert module.early_starts_fail(gpu) == ("invalid attribute" if early else "")
    assert not starts.starts_early(gpu)
    module.triton_fails.cache_clear()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (RuntimeError("invalid device function"), True),
        (OSError("No space left on device"), False),
        (subprocess.CalledProcessError(1, "gcc"), False),  # Python.h is not installed
    ],
)
def test_what_the_system_lacks_is_no_failure_of_the_kernels(
    error: Exception, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")

    def run(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(module, "_failed", {})
    monkeypatch.setattr(module, "_triton_lacks", str)
    monkeypatch.setattr(module, "_run_kernels", run)
    monkeypatch.setattr(module, "_give_up_early_starts", lambda _: False)
    module.triton_fails.cache_clear()
    gpu = torch.device("cuda", 0)
    assert module.triton_fails(gpu)
    assert bool(module.kernels_fail(gpu)) == lasts
    module.triton_fails.cache_clear()


@pytest.mark.thorough
def test_a_gpu_that_is_known_to_start_kernels_late_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from ktcli.ops.triton import early as starts

    gpu, tried = torch.device("cuda", 0), []
    monkeypatch.setattr(starts, "_of_devices", {0: True})
    monkeypatch.setattr(module, "_late", {})
    monkeypatch.setattr(module, "_triton_lacks", str)
    monkeypatch.setattr(module, "_run_kernels", lambda d: tried.append(starts.starts_early(d)))
    module.triton_fails.cache_clear()
    module.start_late(gpu, "invalid attribute")
    assert module.triton_fails(gpu) == "" and tried == [False]
    assert module.early_starts_fail(gpu) == "invalid attribute"
    module.triton_fails.cache_clear()


def test_what_was_compiled_before_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_triton_lacks", str)
    assert not module.compiled_before()
    (tmp_path / "ABC").mkdir()
    (tmp_path / "ABC" / "_product_kernel.cubin").touch()
    assert module.compiled_before()
    monkeypatch.setattr(module, "_triton_lacks", lambda: "triton is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    assert module.compiled_before()


BY_BACKEND = (Embed, Select, Experts)


@pytest.mark.parametrize(
    "kernels",
    [TORCH, EXACT, pytest.param(None, marks=pytest.mark.thorough)],
    ids=["torch", "exact", "triton"],
)
def test_kernels_take_what_the_row_has(kernels: Kernels | None) -> None:
    if kernels is None:
        pytest.importorskip("triton", reason="needs triton")
        kernels = triton_kernels()
    rows = [row for row in FORWARD if row not in BY_BACKEND]
    assert set(kernels.operations) == {row.name for row in rows}
    for row in rows:
        layout = layout_of(row)
        of_step = {"cache": layout.pages, "state": layout.state, "rows": row.reads_step}
        wanted = {name for name, _ in layout.given} | {n for n, read in of_step.items() if read}
        found = set(signature(kernels[row.name]).parameters) - {"exact"}
        assert found == wanted, row.name
