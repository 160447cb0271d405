"""NVIDIA GPUs, asked through `nvidia-smi`: no CUDA library is opened and no torch is needed.

Where that program is missing or does not know the memory, as on machines whose GPU has none of its own, torch is
asked, in a process of its own. Below another root than `/` the recorded answer is the file `nvidia-smi.csv` at the top
of the tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ktcli.errors import UsageError
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import read, whole

# The devices to choose from: a GPU if that is faster, none, the best one ("cuda:N": that one).
AUTO, CPU, CUDA = "auto", "cpu", "cuda"
ALL = "all"  # of the GPUs may be used
_MOST_NAMED, _MOST_NUMBER = 64, 9999

QUERY = (
    "index", "name", "memory.total", "memory.free", "pcie.link.gen.max", "pcie.link.width.max",
    "compute_cap", "driver_version",
)  # fmt: skip

# Bytes per second and lane of each PCIe generation, after line coding.
_LANE_BPS = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def parse_device(said: str) -> tuple[str, int | None]:
    """Returns the type and number in a device's name: "cuda:1" gives ("cuda", 1); without a number it is None.

    Raises:
        UsageError: the text names no device.
    """
    kind, colon, digits = said.partition(":")
    number = whole(digits)
    if kind not in (AUTO, CPU, CUDA) or (colon and (kind != CUDA or number is None)):
        raise UsageError(f"{said[:60]!r} is no device", hint="auto, cpu, cuda, or cuda:N")
    return kind, number


def gpu_numbers(said: str) -> tuple[int, ...] | None:
    """Returns the GPU numbers in a list, "0,1" as (0, 1), and None for "all".

    Raises:
        UsageError: the text is neither, or names a GPU twice.
    """
    if said == ALL:
        return None
    words = said.split(",")
    numbers = [number for word in words if (number := whole(word)) is not None]
    if len(numbers) < len(words) or len(words) > _MOST_NAMED or max(numbers) > _MOST_NUMBER:
        raise UsageError(f"--gpus is {said[:60]!r}", hint="numbers of GPUs such as 0,1, or all")
    twice = next((n for n in numbers if numbers.count(n) > 1), None)
    if twice is not None:
        raise UsageError(f"--gpus {said[:60]} names GPU {twice} twice")
    return tuple(numbers)


# One of these is there where a driver is, the last in Windows' Linux.
_DRIVERS = "/proc/driver/nvidia", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"
_PROGRAMS = "nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"
_ANSWER_S = 20.0
# The variable that names the GPUs a process may use, and the order in which the driver's own tool counts them.
VISIBLE, _BY_SLOT = "CUDA_VISIBLE_DEVICES", "PCI_BUS_ID"
# What torch knows, in the columns of QUERY.
_TORCH = """
import torch
for i in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(i)
    free, whole = torch.cuda.mem_get_info(i)
    name = facts.name.replace(",", " ")
    print(i, name, whole >> 20, free >> 20, "", "", f"{facts.major}.{facts.minor}", "", sep=",")
"""


def read_gpus(root: Path) -> tuple[Gpu, ...]:
    """Returns the GPUs of the machine under `root`; none if the driver does not answer."""
    if root != Path("/"):
        return parse_gpus(read(root / "nvidia-smi.csv") or "")
    return ask_driver() if driver_loaded() else ()


def driver_loaded() -> bool:
    """Tells whether NVIDIA's kernel driver is loaded, without starting a program."""
    return any(map(os.path.exists, _DRIVERS))


def ask_driver() -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible; none if nothing reports any."""
    named = os.environ.get(VISIBLE)
    # Of parts of GPUs, and of another order, nvidia-smi knows nothing.
    by_slot = os.environ.get("CUDA_DEVICE_ORDER", _BY_SLOT) == _BY_SLOT
    asked = by_slot and not (named or "").startswith("MIG-")
    program = next(filter(None, map(shutil.which, _PROGRAMS if asked else ())), None)
    if program is not None and (found := parse_gpus(_queried(program, *QUERY))):
        by_id = named is not None and named.startswith("GPU-")
        return visible(found, named, _queried(program, "uuid").split() if by_id else ())
    # torch itself heeds the variable.
    return parse_gpus(_said([sys.executable, "-c", _TORCH])) if torch_installed() else ()


def hidden() -> str:
    """Returns words that end a sentence that no GPU is found, naming the value of CUDA_VISIBLE_DEVICES; "" if it is
    not set."""
    named = os.environ.get(VISIBLE)
    return "" if named is None else f" of those that {VISIBLE}={named[:60]!r} names"


def hidden_by_mistake() -> bool:
    """Tells whether CUDA_VISIBLE_DEVICES leaves no GPU without being one of the values that are to do that."""
    return driver_loaded() and os.environ.get(VISIBLE, "").strip() not in ("", "-1")


def _queried(program: str, *columns: str) -> str:
    """What nvidia-smi says of each GPU; empty if it fails."""
    return _said([program, f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"])


def _said(command: list[str]) -> str:
    """What a program prints; empty if it fails, or does not end in time."""
    environment = {"CUDA_DEVICE_ORDER": _BY_SLOT, **os.environ}
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def driven_gpus(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Returns the number of GPUs that the kernel's driver has, without asking any of them, which takes a second."""
    try:
        return len(list(drivers.iterdir()))
    except OSError:
        return 0


def visible(gpus: tuple[Gpu, ...], named: str | None, uuids: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible, numbered as CUDA then numbers them.

    CUDA and torch ignore everything from the first name on that means none of them, and see no GPU at all where one is
    named twice. Source: the CUDA programming guide, and `torch.cuda._parse_visible_devices`.

    Args:
        named: the value of CUDA_VISIBLE_DEVICES; None: unset.
        uuids: of each GPU: they are named by them, or by how they begin.
    """
    if named is None:
        return gpus
    by_id = named.startswith("GPU-")
    found: list[Gpu] = []
    for word in named.split(","):
        gpu = _begun(gpus, uuids, word.strip()) if by_id else _numbered(gpus, word)
        if gpu is None:
            break
        if gpu in found:
            return ()
        found.append(gpu)
    return tuple(replace(gpu, index=i) for i, gpu in enumerate(found))


def _numbered(gpus: Sequence[Gpu], word: str) -> Gpu | None:
    """The GPU whose number a word begins with, as C's `strtoul` reads it: "1st" is 1."""
    digits = re.match(r"\s*\+?([0-9]{1,9})", word)
    number = int(digits[1]) if digits else None
    return next((gpu for gpu in gpus if gpu.index == number), None)


def _begun(gpus: Sequence[Gpu], uuids: Sequence[str], word: str) -> Gpu | None:
    """The one GPU whose UUID begins with a word."""
    found = [gpu for gpu, uuid in zip(gpus, uuids, strict=False) if uuid.startswith(word)]
    return found[0] if len(found) == 1 else None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Returns the GPUs in rows of `nvidia-smi` in the order of `QUERY`; rows that do not parse are left out."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY) or not (cells[0].isdigit() and cells[2].isdigit()):
            continue
        generation, width = cells[4], cells[5]
        lanes = int(width) if width.isdigit() else 0
        rate = _LANE_BPS.get(int(generation)) if generation.isdigit() else None
        gpus.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                vram_bytes=int(cells[2]) << 20,
                free_bytes=int(cells[3]) << 20 if cells[3].isdigit() else int(cells[2]) << 20,
                link_bps=rate * lanes if rate and lanes else None,
                capability=cells[6] if cells[6][:1].isdigit() else None,
                driver=cells[7] or None,
            )
        )
    return tuple(gpus)


def torch_installed() -> bool:
    """Tells whether PyTorch (the `gpu` extra) is installed; nothing is imported."""
    return find_spec("torch") is not None
