"""Remembers what running a model showed about this machine: the GPU memory it really got, times of a layer, the speed
of reading prompts, fast methods that fail, tokens that came from stores of KV pages.

It is kept per conversion (`places.conversion_name`) and GPU or CPU, so that the next start counts with it. The memory
counts only as long as no more is free than was free then: whoever had taken it may have gone. A way that failed counts
only with the versions of everything that it failed with, until `forget_failures`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from ktcli import config, smallfiles
from ktcli.errors import KtError
from ktcli.records import dataclass

_GPU, _CPU, _KV = "gpu.json", "cpu.json", "kv.json"
_MAX_BYTES = 1 << 20
_MOST_BYTES = 1 << 60  # of a GPU's memory
_MORE = 1.02  # free memory wavers by some megabytes
_MOST_TOK_S = 1e9
_SAME = 0.1  # a speed that differs by less is not worth another write
_FAILED = "failed"  # the field of ways that fail
_RESTORED = "restored_tokens"
_MOST_REASON = 400  # letters


@dataclass(frozen=True, slots=True)
class Experience:
    """The measurements of one conversion on one GPU.

    Attributes:
        limit_bytes: the bytes of GPU memory that it may take; None: whatever is free.
        layer_s: the seconds of an expert on the CPU, of the GPU's share of a layer, and of the GPU's work
            meanwhile; None: nobody measured.
    """

    limit_bytes: int | None = None
    layer_s: tuple[float, float, float] | None = None


def recall(conversion: str, gpu: str, free_bytes: int) -> Experience:
    """Returns the stored measurements of a conversion on a GPU: the memory limit in bytes, and the seconds of the parts
    of a layer (see `Experience`). Each is None if it was not measured; the limit also if over 2 % more GPU memory is
    free now (`free_bytes`) than when it was stored.
    """
    found = _read(_GPU).get(_key(conversion, gpu))
    if not isinstance(found, dict):
        return Experience()
    limit: int | None = None
    match found.get("memory"):
        case {"free_bytes": int(free), "limit_bytes": int(most)}:
            sound = 0 < free < _MOST_BYTES and 0 < most < _MOST_BYTES
            limit = most if sound and free_bytes <= free * _MORE else None
    times: tuple[float, float, float] | None = None
    match found.get("layer_s"):
        case [float(expert), float(device), float(beside)]:
            sound = all(math.isfinite(t) and t >= 0 for t in (expert, device, beside))
            times = (expert, device, beside) if sound and expert > 0 else None
    return Experience(limit, times)


def one_of(gpu: str, number: int) -> str:
    """Returns "GPU, number N", the key under which measurements of one of several GPUs are stored."""
    return f"{gpu}, number {number}"


def note_memory(conversion: str, gpu: str, free_bytes: int, limit_bytes: int) -> None:
    """Stores the limit in bytes of GPU memory with which a conversion ran, and the bytes that were free; does nothing
    where the library cannot be written.
    """
    _note(
        _GPU,
        _key(conversion, gpu),
        "memory",
        {"free_bytes": free_bytes, "limit_bytes": limit_bytes},
    )


def note_times(conversion: str, gpu: str, layer_s: tuple[float, float, float]) -> None:
    """Stores measured times of a conversion on a GPU, in seconds: of an expert on the CPU, of the GPU's share of a
    layer, and of the GPU's work meanwhile. Does nothing where the library cannot be written.
    """
    _note(_GPU, _key(conversion, gpu), "layer_s", list(layer_s))


def recall_prompt_rate(conversion: str, cpu: str) -> float | None:
    """Returns the measured rate at which a conversion reads prompts on a CPU, in tokens per second; None: nobody
    measured.

    Args:
        cpu: the name of the CPU with its threads and row of kernels, see `hardware.measured.key`.
    """
    match _read(_CPU).get(_key(conversion, cpu)):
        case {"prompt_tok_s": float(rate)} if 0 < rate < _MOST_TOK_S:
            return rate
    return None


def note_prompt_rate(conversion: str, cpu: str, tok_s: float) -> None:
    """Stores the measured rate at which a conversion reads prompts on a CPU, in tokens per second, if it differs from
    the stored one by more than a tenth; does nothing where the library cannot be written.
    """
    known = recall_prompt_rate(conversion, cpu)
    if known is None or abs(tok_s - known) > _SAME * known:
        _note(_CPU, _key(conversion, cpu), "prompt_tok_s", tok_s)


def recall_restored(space: str) -> dict[str, int]:
    """Returns {name of a store of KV pages: number of prompt tokens that ever came from it instead of being computed}.

    Args:
        space: the name of the folder with the pages, see `pagefolder.folder_name`.
    """
    entry = _read(_KV).get(space)
    found = entry.get(_RESTORED) if isinstance(entry, dict) else None
    counts = found if isinstance(found, dict) else {}
    return {name: n for name, n in counts.items() if type(n) is int and 0 <= n < 1 << 62}


def add_restored(space: str, tokens: Mapping[str, int]) -> None:
    """Adds `tokens`, {name of a store: number of prompt tokens}, to the numbers that `recall_restored` returns; does
    nothing where the library cannot be written.
    """
    if any(tokens.values()):
        known = recall_restored(space)
        _note(
            _KV,
            space,
            _RESTORED,
            {n: tokens.get(n, 0) + known.get(n, 0) for n in {**known, **tokens}},
        )


def recall_failures(conversion: str, gpu: str, versions: str) -> tuple[dict[str, str], str]:
    """Returns the fast methods ("kernels", "early", "graphs") known to fail for a conversion on a GPU with these
    versions, as {method: reason}, and the date (ISO) on which that was stored; ({}, ""): none is known to fail.

    Args:
        versions: a text with the versions of everything that may change what fails.
    """
    entry = _read(_GPU).get(_key(conversion, gpu))
    match entry.get(_FAILED) if isinstance(entry, dict) else None:
        case {"with": str(found), "on": str(day), "why": dict(why)} if found == versions:
            sound = {
                way: reason
                for way, reason in why.items()
                if isinstance(reason, str) and reason == _plain(reason)
            }
            return (sound, day) if sound and _is_date(day) else ({}, "")
    return {}, ""


def note_failures(conversion: str, gpu: str, versions: str, why: Mapping[str, str]) -> None:
    """Stores the fast methods that fail for a conversion on a GPU with these versions, {method: reason}, in place of
    those stored before; a method with an empty reason is left out.
    """
    plain = {way: _plain(reason) for way, reason in why.items() if reason}
    found = {"with": versions, "on": date.today().isoformat(), "why": plain}
    _note(_GPU, _key(conversion, gpu), _FAILED, found)


def forget_failures() -> None:
    """Deletes all stored failures of fast methods, so that the next start tries each method again."""
    if any(isinstance(entry, dict) and _FAILED in entry for entry in _read(_GPU).values()):
        _change(_GPU, lambda known: {key: _without_failures(each) for key, each in known.items()})


def _without_failures(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {field: value for field, value in entry.items() if field != _FAILED}


def _plain(reason: str) -> str:
    """A reason as one line of a bounded length, without what steers a terminal."""
    return "".join(c if c.isprintable() else " " for c in reason[:_MOST_REASON])


def _is_date(day: str) -> bool:
    try:
        return date.fromisoformat(day).isoformat() == day
    except ValueError:
        return False


def _note(name: str, key: str, field: str, value: Any) -> None:
    def noted(known: dict[str, Any]) -> dict[str, Any]:
        before = known.get(key)
        return {**known, key: {**(before if isinstance(before, dict) else {}), field: value}}

    _change(name, noted)


def _change(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Writes a file anew, if the library can be written."""
    path = config.home() / name
    lock = smallfiles.lock(path.with_suffix(".lock"), "saving measurements", wait_s=1.0)
    with contextlib.suppress(KtError, OSError), lock:
        smallfiles.write(path, json.dumps(change(_read(name)), indent=1) + "\n")


def _key(conversion: str, where: str) -> str:
    return f"{conversion} on {where}"


def _read(name: str) -> dict[str, Any]:
    return smallfiles.known_object(config.home() / name, _MAX_BYTES)
