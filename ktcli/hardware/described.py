"""A machine described in a few words, for planning a machine that does not exist yet: `cpu=2x8452Y ram=512G
gpu=4090`.

CPUs and GPUs are rows of makers' data sheets; what is not in a table can be said in numbers: `cpu=2x36:amx`,
`gpu=2xRTX 4090:48G`. What follows is described, not measured: bandwidth and arithmetic are those that the planner
assumes of such a machine.
"""

from __future__ import annotations

import re

from ktcli.errors import UsageError
from ktcli.hardware.datasheet import GPUS
from ktcli.hardware.machine import Cpu, Gpu, Machine, Memory, Node
from ktcli.records import dataclass

FORM = "cpu=2x8452Y ram=512G gpu=4090, or with numbers: cpu=2x36:amx ram=512G gpu=2x4090:48G"

# Rows of kernels that a CPU runs, the best first, and the flags that they need.
_FLAGS = ("avx2", "fma", "f16c")
_AVX512 = (*_FLAGS, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_ROWS = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _FLAGS,
    "portable": (),
}
# Makers' data sheets: physical cores of one socket (the fast ones of two kinds), and the row.
_CPUS = {
    "Xeon Platinum 8452Y": (36, "amx"),
    "Xeon Platinum 8468": (48, "amx"),
    "Xeon Platinum 8480+": (56, "amx"),
    "Xeon Platinum 8488C": (48, "amx"),
    "Xeon Platinum 8592+": (64, "amx"),
    "Xeon Gold 6430": (32, "amx"),
    "Xeon Gold 6454S": (32, "amx"),
    "Xeon Gold 6530": (32, "amx"),
    "Xeon w9-3495X": (56, "amx"),
    "Xeon w7-3465X": (28, "amx"),
    "Xeon w5-3435X": (16, "amx"),
    "Xeon 6980P": (128, "amx"),
    "Xeon Platinum 8380": (40, "avx512"),
    "Xeon Gold 6330": (28, "avx512"),
    "Xeon Platinum 8272CL": (26, "avx512"),
    "EPYC 9965": (192, "avx512bf16"),
    "EPYC 9755": (128, "avx512bf16"),
    "EPYC 9654": (96, "avx512bf16"),
    "EPYC 9554": (64, "avx512bf16"),
    "EPYC 9474F": (48, "avx512bf16"),
    "EPYC 9354": (32, "avx512bf16"),
    "EPYC 9334": (32, "avx512bf16"),
    "EPYC 7763": (64, "avx2"),
    "EPYC 7742": (64, "avx2"),
    "EPYC 7543": (32, "avx2"),
    "EPYC 7532": (32, "avx2"),
    "EPYC 7282": (16, "avx2"),
    "Threadripper PRO 7995WX": (96, "avx512bf16"),
    "Threadripper PRO 7985WX": (64, "avx512bf16"),
    "Threadripper PRO 7975WX": (32, "avx512bf16"),
    "Threadripper PRO 7965WX": (24, "avx512bf16"),
    "Threadripper PRO 5975WX": (32, "avx2"),
    "Ryzen 9 9950X": (16, "avx512bf16"),
    "Ryzen 9 7950X": (16, "avx512bf16"),
    "Ryzen 7 9700X": (8, "avx512bf16"),
    "Ryzen 7 7700X": (8, "avx512bf16"),
    "Ryzen 9 5950X": (16, "avx2"),
    "Core i9-14900K": (8, "avx2"),
    "Core i9-13900K": (8, "avx2"),
    "Core i7-13700K": (8, "avx2"),
    "Core i7-12700K": (8, "avx2"),
}
_LINK_BPS = {4: 31.5e9, 5: 63.0e9}  # 16 lanes, on paper
_FREE_SHARE = 0.98  # of memory, on a machine that does nothing else
_GIB, _SIZE = 1 << 30, r"([0-9]{1,6})(?:\.0)?\s*([GT])i?B?"
_MOST = 64  # sockets, and GPUs


@dataclass(frozen=True, slots=True)
class _Several:
    """Parts of one kind: how many, their name, and what is said of each behind a colon."""

    count: int
    name: str
    detail: str


def is_described(text: str) -> bool:
    """Returns whether a text describes a machine in words ("cpu=… ram=…") rather than naming a file."""
    return re.match(r"\s*(cpu|ram|gpu)=", text) is not None


def described(text: str) -> Machine:
    """Returns the machine that a text describes, such as "cpu=2x8452Y ram=512G gpu=4090".

    Raises:
        UsageError: the text describes no machine; the message names the part that is wrong or missing.
    """
    found = re.findall(r"(\w+)=\s*((?:(?!\s+\w+=).)+)", text)
    words = {key: value.strip() for key, value in found}
    wrong = [key for key in words if key not in ("cpu", "ram", "gpu")]
    missing = [key for key in ("cpu", "ram") if key not in words]
    if wrong or missing or len(words) < len(found):
        what = (
            f"has {wrong[0]!r}"
            if wrong
            else f"lacks {missing[0]}="
            if missing
            else "gives a key twice"
        )
        raise UsageError(f"the machine {text[:200]!r} {what}", hint=f"for example: {FORM}")
    cpu, count = _cpu(words["cpu"])
    size = _bytes(words["ram"], "ram")
    free = int(size * _FREE_SHARE)
    per = len(cpu.cores) // count
    nodes = tuple(
        Node(each, cpu.cores[each * per : (each + 1) * per], size // count, free // count)
        for each in range(count)
    )
    return Machine(
        name=" ".join(text.split())[:200],
        system="described",
        cpu=cpu,
        memory=Memory(size, free, huge_pages="madvise"),
        nodes=nodes,
        gpus=_gpus(words["gpu"]) if words.get("gpu", "none") != "none" else (),
    )


def _several(text: str, key: str) -> _Several:
    found = re.fullmatch(r"(?:([0-9]{1,3})\s*x\s*)?([^:]+)(?::(.+))?", text, re.IGNORECASE)
    if found is None or not 1 <= int(found[1] or 1) <= _MOST:
        raise UsageError(
            f"{key}={text[:80]!r} is not a known part of a machine", hint=f"for example: {FORM}"
        )
    return _Several(int(found[1] or 1), found[2].strip(), (found[3] or "").strip())


def _bytes(text: str, key: str) -> int:
    found = re.fullmatch(_SIZE, text, re.IGNORECASE)
    if found is None or not int(found[1]):
        raise UsageError(
            f"{key}={text[:80]!r} is not a size such as 512G", hint=f"for example: {FORM}"
        )
    return int(found[1]) * _GIB * (1024 if found[2].upper() == "T" else 1)


def _cpu(text: str) -> tuple[Cpu, int]:
    """The CPUs of all sockets, and how many there are."""
    said = _several(text, "cpu")
    if said.name.isdigit() and said.detail:
        name, cores, row = f"{said.name} cores with {said.detail}", int(said.name), said.detail
        if row not in _ROWS or not 1 <= cores <= 1024:
            raise UsageError(
                f"cpu={text[:80]!r} is not a number of cores with a kernel row",
                hint=f"rows: {', '.join(_ROWS)}; for example: {FORM}",
            )
    else:
        name = _named(said.name, tuple(_CPUS), "cpu", "its cores and row, such as 2x36:amx")
        cores, row = _CPUS[name]
    rows = tuple(_ROWS)
    total = cores * said.count
    made = Cpu(
        model=name,
        isa=rows[rows.index(row) :],
        flags=_ROWS[row],
        sockets=said.count,
        physical_cores=total,
        logical_cpus=2 * total,
        cores=tuple(range(total)),
    )
    return made, said.count


def _gpus(text: str) -> tuple[Gpu, ...]:
    said = _several(text, "gpu")
    names = tuple(name for name, row in GPUS.items() if row.memory_gb)
    name = _named(said.name, names, "gpu", "the nearest one with its memory, such as 4090:48G")
    row = GPUS[name]
    vram = _bytes(said.detail, "gpu") if said.detail else row.memory_gb * _GIB
    return tuple(
        Gpu(
            index=index,
            name=f"NVIDIA {name}",
            vram_bytes=vram,
            free_bytes=int(vram * _FREE_SHARE),
            link_bps=_LINK_BPS[row.pcie],
            capability=row.capability,
        )
        for index in range(said.count)
    )


def _named(text: str, names: tuple[str, ...], key: str, otherwise: str) -> str:
    """The one name of a table that ends in what was said, or has it as a word."""
    said = _words(text)
    whole = [name for name in names if _words(name) == said]
    last = [name for name in names if _words(name)[-len(said) :] == said]
    inside = [name for name in names if f" {' '.join(said)} " in f" {' '.join(_words(name))} "]
    for found in (whole, last, inside):
        if len(found) == 1:
            return found[0]
    close = inside or [name for name in names if text.lower() in name.lower()]
    which = f"could be {', '.join(close[:4])}" if close else "is not in kt's table"
    raise UsageError(f"{key}={text[:80]} {which}", hint=f"say {otherwise}; for example: {FORM}")


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9+]+", text.lower())
