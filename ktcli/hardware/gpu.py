"""NVIDIA GPUs, asked through `nvidia-smi`: no CUDA library is opened and no torch is needed.

Where that program is missing or does not know the memory, as on machines whose GPU has none of its own or is shared
out in parts (MIG), torch is asked, in a process of its own. Below another root than `/` the recorded answer is the file
`nvidia-smi.csv` at the top of the tree.

Each row counts by itself: one GPU that fails, which the exit status tells, hides no other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ktcli.errors import UsageError
from ktcli.hardware.machine import Gpu
from ktcli.hardware.text import read, whole
from ktcli.records import dataclass

# The devices to choose from: a GPU if that is faster, none, the best one ("cuda:N": that one).
AUTO, CPU, CUDA = "auto", "cpu", "cuda"
ALL = "all"  # of the GPUs may be used
_MOST_NAMED, _MOST_NUMBER = 64, 9999

# The last may be missing from a recorded answer.
QUERY = (
    "index", "name", "memory.total", "memory.free", "pcie.link.gen.max", "pcie.link.width.max",
    "compute_cap", "driver_version", "mig.mode.current",
)  # fmt: skip
# What drivers say that do not know a column yet: before 450 there was no MIG, before 510 no compute_cap.
_NOT_A_COLUMN = re.compile(r'Field "([\w.]+)" is not a valid field')
_LONGEST_WORDS, _MOST_WORDS = 200, 8

# Bytes per second and lane of each PCIe generation, after line coding.
_LANE_BPS = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


def parse_device(said: str) -> tuple[str, int | None]:
    """Returns the type ("auto", "cpu" or "cuda") and number in a device's name: "cuda:1" gives ("cuda", 1), and "cuda"
    ("cuda", None).

    Raises:
        UsageError: the text names no device.
    """
    kind, colon, digits = said.partition(":")
    number = whole(digits)
    if kind not in (AUTO, CPU, CUDA) or (colon and (kind != CUDA or number is None)):
        raise UsageError(f"{said[:60]!r} is not a device", hint="use auto, cpu, cuda or cuda:N")
    return kind, number


def gpu_numbers(said: str) -> tuple[int, ...] | None:
    """Returns the GPU numbers in a value of --gpus: "0,1" gives (0, 1); "all" gives None.

    Raises:
        UsageError: the text is neither a list of numbers nor "all", or names a GPU twice.
    """
    if said == ALL:
        return None
    words = said.split(",")
    numbers = [number for word in words if (number := whole(word)) is not None]
    if len(numbers) < len(words) or len(words) > _MOST_NAMED or max(numbers) > _MOST_NUMBER:
        raise UsageError(
            f"--gpus cannot be {said[:60]!r}", hint="use GPU numbers such as 0,1, or all"
        )
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


def has_capability(gpu: Gpu, least: int) -> bool:
    """Returns whether the major number of a GPU's CUDA compute capability is at least `least`;
    True if it is unknown.
    """
    major = whole((gpu.capability or "").partition(".")[0])
    return major is None or major >= least


@dataclass(frozen=True, slots=True)
class GpusFound:
    """The usable GPUs, and messages of the driver about others.

    Attributes:
        unread: of each GPU that cannot be used, and of a failure as a whole, a line of nvidia-smi or the words why.
        parts: whether one is shared out in parts (MIG), of which CUDA sees one, and counts otherwise.
    """

    gpus: tuple[Gpu, ...] = ()
    unread: tuple[str, ...] = ()
    parts: bool = False


def read_gpus(root: Path) -> GpusFound:
    """Returns the usable NVIDIA GPUs of the machine under `root`, of the running one those that CUDA_VISIBLE_DEVICES
    leaves visible, with the driver's messages about unusable ones; none if no driver is loaded or answers.
    """
    if root != Path("/"):
        return _told(read(root / "nvidia-smi.csv") or "", QUERY)
    return look_for_gpus() if driver_loaded() else GpusFound()


def driver_loaded() -> bool:
    """Returns whether NVIDIA's kernel driver is loaded, without starting a program."""
    return any(map(os.path.exists, _DRIVERS))


def ask_driver() -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible; none if nothing reports any."""
    return look_for_gpus().gpus


def look_for_gpus() -> GpusFound:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves visible, with nvidia-smi's messages about those that fail."""
    named = os.environ.get(VISIBLE)
    # Of parts of GPUs, and of another order, nvidia-smi knows nothing.
    by_slot = os.environ.get("CUDA_DEVICE_ORDER", _BY_SLOT) == _BY_SLOT
    asked = by_slot and not (named or "").startswith("MIG-")
    program = next(filter(None, map(shutil.which, _PROGRAMS if asked else ())), "")
    found = _asked(program) if program else GpusFound()
    if (found.parts or not found.gpus) and torch_installed():
        # torch itself heeds the variable.
        seen = _told(_said([sys.executable, "-c", _TORCH])[0], QUERY).gpus
        if seen or not found.gpus:
            return GpusFound(seen, () if seen else found.unread)
    by_id = program and named is not None and named.startswith("GPU-")
    said = _queried(program, "index", "uuid")[0] if by_id else ""
    by_index = dict(re.findall(r"^([0-9]+), (GPU-\S+)", said, re.MULTILINE))
    uuids = [by_index.get(str(gpu.index), "") for gpu in found.gpus]
    return replace(found, gpus=visible(found.gpus, named, uuids))


def hidden() -> str:
    """Returns words to append to "no GPU was found" that name the value of CUDA_VISIBLE_DEVICES (" among those in …");
    "" if the variable is not set.
    """
    named = os.environ.get(VISIBLE)
    return "" if named is None else f" among those in {VISIBLE}={named[:60]!r}"


def hidden_by_mistake() -> bool:
    """Returns whether an NVIDIA driver is loaded and CUDA_VISIBLE_DEVICES has a value other than "" and "-1", the two
    that hide all GPUs on purpose. Call it where no GPU was found.
    """
    return driver_loaded() and os.environ.get(VISIBLE, "").strip() not in ("", "-1")


def _asked(program: str) -> GpusFound:
    """What nvidia-smi knows of each GPU, asked again without the columns that it does not know."""
    columns: tuple[str, ...] = QUERY
    while True:
        said, failure = _queried(program, *columns)
        unknown = _NOT_A_COLUMN.search(said)
        if unknown is None or unknown[1] not in columns[_FREE + 1 :]:
            break
        columns = tuple(column for column in columns if column != unknown[1])
    found = _told(said, columns)
    return replace(found, unread=(*found.unread, failure)) if failure else found


def _queried(program: str, *columns: str) -> tuple[str, str]:
    """What nvidia-smi says of each GPU, and why it says nothing."""
    return _said([program, f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"])


def _said(command: list[str]) -> tuple[str, str]:
    """What a program prints; and if that is nothing because it fails or does not end in time, the words for it."""
    environment = {"CUDA_DEVICE_ORDER": _BY_SLOT, **os.environ}
    try:
        answer = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if command[0] != sys.executable else subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_ANSWER_S:g} s"
    except OSError as error:
        return "", f"no answer, because it cannot be run: {error.strerror}"
    silent = answer.returncode and not answer.stdout.strip()
    return answer.stdout, f"no answer, exit code {answer.returncode}" if silent else ""


def driven_gpus(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Returns the number of GPUs that NVIDIA's kernel driver lists under `drivers`; 0 without the driver. It queries no
    GPU, which would take a second.
    """
    try:
        return len(list(drivers.iterdir()))
    except OSError:
        return 0


def visible(gpus: tuple[Gpu, ...], named: str | None, uuids: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """Returns the GPUs of `gpus` that CUDA_VISIBLE_DEVICES leaves visible, in its order and renumbered from 0 as CUDA
    does.

    CUDA and torch ignore the first name that matches no GPU and all names after it, and see no GPU at all where one is
    named twice. Source: the CUDA programming guide, and `torch.cuda._parse_visible_devices`.

    Args:
        named: the value of CUDA_VISIBLE_DEVICES; None: unset, all are visible.
        uuids: the UUID of each GPU, of which `named` may give the first characters.
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
    """Returns the GPUs in the CSV rows that `nvidia-smi` prints for the columns `QUERY`; rows that do not parse are
    left out.
    """
    return _told(text, QUERY).gpus


def _told(text: str, columns: Sequence[str]) -> GpusFound:
    """The GPUs of the rows of an answer that parse, and the words about the others."""
    found = list(_parsed(text, columns))
    gpus = tuple(each for each in found if isinstance(each, Gpu))
    words = (" ".join(each.split()) for each in found if isinstance(each, str))
    unread = tuple(each[:_LONGEST_WORDS] for each in words if each)[:_MOST_WORDS]
    return GpusFound(gpus, unread, any(f"{_MIG} is Enabled" in each for each in unread))


_FREE = QUERY.index("memory.free")  # up to here every driver knows the columns
_MIG = "mig.mode.current"


def _parsed(text: str, columns: Sequence[str]) -> Iterator[Gpu | str]:
    """Of each line its GPU, or why it is none: nothing is planned where nobody knows how much memory is free."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if not len(columns) - 1 <= len(cells) <= len(columns) or whole(cells[0]) is None:
            yield line
            continue
        row = dict(zip(columns, cells, strict=False))
        memory = ("memory.total", "memory.free")
        wrong = next((column for column in memory if whole(row[column]) is None), None)
        if row.get(_MIG) == "Enabled":
            wrong = _MIG
        if wrong is None:
            yield _gpu(row)
        else:
            yield f"GPU {row['index']}, {row['name']}: {wrong} is {row[wrong] or 'empty'}"


def _gpu(row: Mapping[str, str]) -> Gpu:
    """The GPU of a row whose memory is known."""
    generation, width = row["pcie.link.gen.max"], row["pcie.link.width.max"]
    lanes, rate = whole(width), _LANE_BPS.get(whole(generation) or 0)
    capability = row.get("compute_cap", "")
    return Gpu(
        index=int(row["index"]),
        name=row["name"],
        vram_bytes=int(row["memory.total"]) << 20,
        free_bytes=int(row["memory.free"]) << 20,
        link_bps=rate * lanes if rate and lanes else None,
        capability=capability if capability[:1].isdigit() else None,
        driver=row.get("driver_version") or None,
    )


def torch_installed() -> bool:
    """Returns whether PyTorch (the `gpu` extra) is installed; nothing is imported."""
    return find_spec("torch") is not None
