"""The manufacturers' data sheets of GPUs: bandwidth and arithmetic, for GPUs that have not been measured.

Rows are NVIDIA's data sheets and architecture papers: memory bandwidth, and bf16 tensor operations without
sparsity, with f32 accumulation, a multiply and an add being two. A board of another memory size or power
limit may differ, so whoever uses a row says that it is assumed.
"""

from __future__ import annotations

from typing import NamedTuple

from ktcli.hardware.machine import Gpu
from ktcli.records import dataclass


@dataclass(frozen=True, slots=True)
class Sheet:
    """One row of the table: bytes per second read from a GPU's memory, and bf16 operations per second.

    Attributes:
        name: a part of the GPU's name; or the kind of GPU, where its name is not listed.
        known: whether the name is listed.
    """

    name: str
    read_bps: float
    bf16_ops: float
    known: bool = True


class GpuRow(NamedTuple):
    """A row of the table: GB/s, TFLOP/s, and of a GPU that a machine can be described with, gigabytes of memory,
    compute capability and PCIe generation of 16 lanes."""

    read_gb_s: int
    tflop_s: int
    memory_gb: int = 0
    capability: str = ""
    pcie: int = 0


GPUS = {
    "B200": GpuRow(8000, 2250, 180, "10.0", 5),
    "H200": GpuRow(4800, 989, 141, "9.0", 5),
    "H100": GpuRow(3350, 989, 80, "9.0", 5),
    "H100 NVL": GpuRow(3900, 835),
    "H100 PCIe": GpuRow(2000, 756),
    "H800": GpuRow(3350, 989, 80, "9.0", 5),
    "H20": GpuRow(4000, 148, 96, "9.0", 5),
    "A100": GpuRow(1555, 312),
    "A100-PCIE-40GB": GpuRow(1555, 312, 40, "8.0", 4),
    "A100 80GB PCIe": GpuRow(1935, 312, 80, "8.0", 4),
    "A100-SXM4-80GB": GpuRow(2039, 312),
    "A800": GpuRow(1935, 312),
    "A10": GpuRow(600, 125, 24, "8.6", 4),
    "A30": GpuRow(933, 165, 24, "8.0", 4),
    "A40": GpuRow(696, 149, 48, "8.6", 4),
    "L4": GpuRow(300, 121, 24, "8.9", 4),
    "L20": GpuRow(864, 119, 48, "8.9", 4),
    "L40": GpuRow(864, 181, 48, "8.9", 4),
    "L40S": GpuRow(864, 362, 48, "8.9", 4),
    "RTX A6000": GpuRow(768, 154, 48, "8.6", 4),
    "RTX 6000 Ada": GpuRow(960, 364, 48, "8.9", 4),
    "RTX PRO 6000": GpuRow(1792, 503, 96, "12.0", 5),
    "RTX 3060": GpuRow(360, 25, 12, "8.6", 4),
    "RTX 3070": GpuRow(448, 40, 8, "8.6", 4),
    "RTX 3080": GpuRow(760, 59, 10, "8.6", 4),
    "RTX 3090": GpuRow(936, 71, 24, "8.6", 4),
    "RTX 4060": GpuRow(272, 30, 8, "8.9", 4),
    "RTX 4060 Ti": GpuRow(288, 44, 16, "8.9", 4),
    "RTX 4060 Laptop": GpuRow(256, 30),
    "RTX 4070": GpuRow(504, 58, 12, "8.9", 4),
    "RTX 4070 Ti": GpuRow(504, 80, 12, "8.9", 4),
    "RTX 4070 Laptop": GpuRow(256, 40),
    "RTX 4080": GpuRow(716, 97, 16, "8.9", 4),
    "RTX 4080 Laptop": GpuRow(432, 60),
    "RTX 4090": GpuRow(1008, 165, 24, "8.9", 4),
    "RTX 4090 Laptop": GpuRow(576, 80),
    "RTX 5060": GpuRow(448, 38, 8, "12.0", 5),
    "RTX 5070": GpuRow(672, 61, 12, "12.0", 5),
    "RTX 5070 Ti": GpuRow(896, 87, 16, "12.0", 5),
    "RTX 5080": GpuRow(960, 112, 16, "12.0", 5),
    "RTX 5090": GpuRow(1792, 209, 32, "12.0", 5),
}
# For a GPU that is not listed: the slowest of its generation that is sold with enough memory to matter.
_CAPABILITIES = {"8": (256, 25), "9": (2000, 148), "10": (4000, 1000), "12": (448, 38)}
_UNKNOWN = (200, 15)


def data_sheet(gpu: Gpu) -> Sheet:
    """Returns a GPU's memory bandwidth (bytes/s) and bf16 operations per second according to data sheets: those of the
    longest listed name that the GPU's name contains, else assumed ones for its compute capability.
    """
    words = f" {gpu.name} ".lower()
    matches = [name for name in GPUS if f" {name.lower()}" in words and _ends(words, name)]
    if matches:
        name = max(matches, key=len)
        return Sheet(name, GPUS[name].read_gb_s * 1e9, GPUS[name].tflop_s * 1e12)
    generation = (gpu.capability or "").partition(".")[0]
    read, ops = _CAPABILITIES.get(generation, _UNKNOWN)
    kind = f"compute capability {gpu.capability}" if gpu.capability else "an unknown GPU"
    return Sheet(kind, read * 1e9, ops * 1e12, known=False)


def _ends(words: str, name: str) -> bool:
    """Returns whether a name stands in the words as whole words: an "L4" is not an "L40S"."""
    after = words[words.index(f" {name.lower()}") + len(name) + 1 :][:1]
    return not after.isalnum()
