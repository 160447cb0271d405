"""Says in one sentence why the engine ended, from the last lines that it printed: a table of known reasons."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from ktcli.errors import (
    Busy,
    DeviceError,
    KtError,
    NoMemoryLeft,
    NotFound,
    OutOfDeviceMemory,
    UsageError,
)
from ktcli.records import dataclass

_SHOWN = 300
_LAST = 60  # of the lines that are looked at: earlier warnings are no reason


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """A reason for which engines end.

    Attributes:
        pattern: what they print then.
        said: the sentence, behind "sglang-kt 0.7.2".
        hint: what to do next.
        kind: the error, which gives kt's exit code.
    """

    pattern: re.Pattern[str]
    said: str
    hint: str
    kind: Callable[..., KtError] = KtError


def _failure(
    pattern: str, said: str, hint: str, kind: Callable[..., KtError] = KtError
) -> EngineFailure:
    return EngineFailure(re.compile(pattern, re.IGNORECASE), said, hint, kind)


# The first row that fits counts: more special ones stand before others.
KNOWN = (
    _failure(
        r"CUDA out of memory|OutOfMemoryError|Not enough memory\. Please try|Capture cuda graph failed.*memory",
        "ran out of the GPUs' memory",
        "use a smaller --context, --parallel or --gpu-experts",
        OutOfDeviceMemory,
    ),
    _failure(
        r"address already in use|Errno 98\]|port .{0,40} is (already in use|occupied|not available)",
        "found its port, or one that its processes talk through, taken by another program",
        "choose another port: --port; kt ps lists what runs",
        Busy,
    ),
    _failure(
        r"trust_remote_code",
        "needs Python code of the model's repository",
        "read that code first; --trust-remote-code allows it",
        UsageError,
    ),
    _failure(
        r"unrecognized arguments|invalid choice|the following arguments are required",
        "does not take the command line that kt wrote",
        "kt serve --dry-run shows it; kt engine list shows whether the tested version is installed",
    ),
    _failure(
        r"No such file or directory|FileNotFoundError|does not appear to have a file named"
        r"|is not a local folder|does not exist",
        "did not find a file of the model",
        "kt verify NAME checks the checkpoint; --expert-weights has to be the folder of kt-kernel's conversion",
        NotFound,
    ),
    _failure(
        r"CUDA driver version is insufficient|driver .{0,30}is too old|no kernel image is available"
        r"|No CUDA GPUs are available|CUDA initialization|CUDA-capable device|No accelerator \(CUDA",
        "cannot use the GPU or its driver",
        "kt doctor shows GPU and driver; CUDA 12.8 needs driver 525 or newer",
        DeviceError,
    ),
    _failure(
        r"NCCL (error|WARN)|ncclSystemError|ncclUnhandledCudaError|DistBackendError|ncclInternalError",
        "could not connect its GPUs (NCCL)",
        "a larger /dev/shm, or NCCL_P2P_DISABLE=1, helps in containers and where GPUs do not reach each other",
        DeviceError,
    ),
    _failure(
        r"Cannot allocate memory|MemoryError|std::bad_alloc|mbind|Bus error",
        "ran out of memory",
        "kt plan NAME says what the model needs; ps shows what else takes memory",
        NoMemoryLeft,
    ),
    _failure(
        r"Illegal instruction|SIGILL",
        "has no kernels for this CPU",
        "kt-kernel needs AVX2, and most of its methods AVX-512 or AMX",
    ),
    _failure(
        r"watchdog timeout|Watchdog .{0,30}timeout|scheduler.{0,40}(hang|stuck)",
        "stopped itself because a step took too long",
        "a shorter --context or a smaller --prefill-threshold makes steps shorter",
    ),
)


def why_ended(label: str, lines: Sequence[str], code: int | None) -> KtError:
    """Returns the error that says why an engine process ended, judged by its output and exit code.

    Args:
        label: the engine's name and version.
        lines: the last lines that it printed, oldest first.
        code: its exit code; negative: the signal that ended it.
    """
    last = lines[-_LAST:]
    for row in KNOWN:
        if any(row.pattern.search(line) for line in last):
            found = next(line for line in reversed(last) if row.pattern.search(line))
            return row.kind(f"{label} {row.said}: {_plain(found)}", hint=row.hint)
    if code == -signal.SIGKILL:
        return NoMemoryLeft(
            f"{label} was killed, most likely because memory was full",
            hint="dmesg says whether; kt plan NAME says what the model needs",
        )
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    said = next((line for line in reversed(last) if _is_told(line)), "it printed nothing")
    return KtError(f"{label} ended: {_plain(said)} ({how})")


def _is_told(line: str) -> bool:
    """Returns whether a line may be a reason: no part of a traceback, of a bar or of a frame."""
    return not line.startswith(("Traceback", "File ", "^", "~", "=", "-")) and any(
        char.isalpha() for char in line
    )


def _plain(line: str) -> str:
    """Returns a line without the time and the rank that SGLang puts before it."""
    return re.sub(r"^\[[^\]]{1,60}\]\s*", "", line)[:_SHOWN]
