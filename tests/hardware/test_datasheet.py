"""Data sheets of GPUs: found by name, and a cautious row for what is not listed."""

from dataclasses import replace

import pytest

from ktcli.hardware.datasheet import data_sheet
from ktcli.hardware.machine import Gpu
from ktcli.hardware.probe import probe
from ktcli.main import main


def sheet(name: str, capability: str | None = None):
    return data_sheet(Gpu(0, name, 1, 1, capability=capability))


@pytest.mark.parametrize(
    ("name", "row", "read"),
    [
        ("NVIDIA H200", "H200", 4800),
        ("NVIDIA H100 80GB HBM3", "H100", 3350),
        ("NVIDIA H100 PCIe", "H100 PCIe", 2000),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", 2039),
        ("NVIDIA A100-SXM4-40GB", "A100", 1555),
        ("NVIDIA L4", "L4", 300),
        ("NVIDIA L40S", "L40S", 864),
        ("NVIDIA L20", "L20", 864),
        ("NVIDIA B200", "B200", 8000),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 1008),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop", 256),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti", 504),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 1792),
    ],
)
def test_names_that_nvidia_smi_gives(name: str, row: str, read: int):
    found = sheet(name)
    assert (found.name, found.read_bps, found.known) == (row, read * 1e9, True)


@pytest.mark.parametrize("name", ["NVIDIA L400", "Quadro", "", "NVIDIA GeForce RTX 40900"])
def test_what_is_not_listed_is_cautious(name: str):
    rows = [sheet(name, capability) for capability in ("9.0", "8.6", None)]
    assert not any(row.known for row in rows)
    assert [row.read_bps for row in rows] == sorted((row.read_bps for row in rows), reverse=True)
    assert "8.6" in rows[1].name


def test_doctor_says_what_is_assumed_and_what_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    gpus = (
        Gpu(0, "NVIDIA GeForce RTX 4090", 24 << 30, 23 << 30),
        Gpu(1, "Other", 8 << 30, 8 << 30, capability="8.6", read_bps=3e11, bf16_ops=4e13),
    )
    here = probe()
    monkeypatch.setattr("ktcli.commands.doctor.probe", lambda: replace(here, gpus=gpus))
    main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "read 1008 GB/s, bf16 165 TFLOP/s, assumed from the data sheet of RTX 4090" in shown
    assert "read 300 GB/s, bf16 40 TFLOP/s, measured" in shown
