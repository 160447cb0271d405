"""Records which fast methods fail on this machine's GPUs, so that the next start uses the fallbacks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from ktcli import __version__
from ktcli.engine.device.fallbacks import Failures, KnownFailures
from ktcli.hardware.machine import Gpu
from ktcli.store import experience


def known_failures_of(conversion: str, gpus: Sequence[Gpu]) -> KnownFailures:
    """Returns which fast GPU methods are known to fail for a conversion on these GPUs, with a function that stores
    newly found failures.
    """
    where, versions = gpus[0].name, versions_of(gpus)
    found, day = experience.recall_failures(conversion, where, versions)
    known = Failures(**{way: found.get(way, "") for way in asdict(Failures())})

    def keep(failures: Failures) -> None:
        experience.note_failures(conversion, where, versions, asdict(failures))

    return KnownFailures(known, day if known != Failures() else "", keep)


def versions_of(gpus: Sequence[Gpu]) -> str:
    """Returns a text with the versions of kt, torch, triton, GPUs and drivers on which failures of GPU methods may
    depend: stored failures count only for an equal text.
    """
    kinds = {
        f"{gpu.name} {gpu.capability or 'of unknown capability'} driver {gpu.driver or 'unknown'}"
        for gpu in gpus
    }
    parts = [f"kt {__version__}", f"torch {torch.__version__}", f"triton {_triton()}"]
    return ", ".join([*parts, *sorted(kinds)])


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
