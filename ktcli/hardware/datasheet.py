"""The manufacturers' data sheets of GPUs: bandwidth and arithmetic, for GPUs that have not been measured.

Rows are NVIDIA's data sheets and architecture papers: memory bandwidth, and bf16 tensor operations without
sparsity, with f32 accumulation, a multiply and an add being two. A board of another memory size or power
limit may differ, so whoever uses a row says that it is assumed.
"""

from __future__ import annotations

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


# name: GB/s, TFLOP/s
_NAMES = {
    "B200": (8000, 2250),
    "H200": (4800, 989),
    "H100": (3350, 989),
    "H100 NVL": (3900, 835),
    "H100 PCIe": (2000, 756),
    "H800": (3350, 989),
    "H20": (4000, 148),
    "A100": (1555, 312),
    "A100-PCIE-40GB": (1555, 312),
    "A100 80GB PCIe": (1935, 312),
    "A100-SXM4-80GB": (2039, 312),
    "A800": (1935, 312),
    "A10": (600, 125),
    "A30": (933, 165),
    "A40": (696, 149),
    "L4": (300, 121),
    "L20": (864, 119),
    "L40": (864, 181),
    "L40S": (864, 362),
    "RTX A6000": (768, 154),
    "RTX 6000 Ada": (960, 364),
    "RTX PRO 6000": (1792, 503),
    "RTX 3060": (360, 25),
    "RTX 3070": (448, 40),
    "RTX 3080": (760, 59),
    "RTX 3090": (936, 71),
    "RTX 4060": (272, 30),
    "RTX 4060 Ti": (288, 44),
    "RTX 4060 Laptop": (256, 30),
    "RTX 4070": (504, 58),
    "RTX 4070 Ti": (504, 80),
    "RTX 4070 Laptop": (256, 40),
    "RTX 4080": (716, 97),
    "RTX 4080 Laptop": (432, 60),
    "RTX 4090": (1008, 165),
    "RTX 4090 Laptop": (576, 80),
    "RTX 5060": (448, 38),
    "RTX 5070": (672, 61),
    "RTX 5070 Ti": (896, 87),
    "RTX 5080": (960, 112),
    "RTX 5090": (1792, 209),
}
# For a GPU that is not listed: the slowest of its generation that is sold with enough memory to matter.
_CAPABILITIES = {"8": (256, 25), "9": (2000, 148), "10": (4000, 1000), "12": (448, 38)}
_UNKNOWN = (200, 15)


def data_sheet(gpu: Gpu) -> Sheet:
    """Returns the data sheet's row for a GPU: that of the longest name contained in its own, else that of its
    generation.
    """
    words = f" {gpu.name} ".lower()
    matches = [name for name in _NAMES if f" {name.lower()}" in words and _ends(words, name)]
    if matches:
        name = max(matches, key=len)
        read, ops = _NAMES[name]
        return Sheet(name, read * 1e9, ops * 1e12)
    generation = (gpu.capability or "").partition(".")[0]
    read, ops = _CAPABILITIES.get(generation, _UNKNOWN)
    kind = f"compute capability {gpu.capability}" if gpu.capability else "an unknown GPU"
    return Sheet(kind, read * 1e9, ops * 1e12, known=False)


def _ends(words: str, name: str) -> bool:
    """Returns whether a name stands in the words as whole words: an "L4" is not an "L40S"."""
    after = words[words.index(f" {name.lower()}") + len(name) + 1 :][:1]
    return not after.isalnum()
