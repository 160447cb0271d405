"""Prepares a process for training before torch is loaded; nothing here imports torch."""

from __future__ import annotations

import os

from ktcli.errors import UsageError
from ktcli.hardware.gpu import torch_installed


def require_torch() -> None:
    """Raises an error unless PyTorch is installed; sets OMP_WAIT_POLICY=PASSIVE in the environment unless it is set.

    Torch reads this setting when it is loaded. OpenMP threads that wait by spinning would take the cores from the
    native pool.

    Raises:
        UsageError: PyTorch is not installed.
    """
    if not torch_installed():
        raise UsageError(
            "fine-tuning needs PyTorch, which is not installed",
            hint='pip install "ktcli[finetune]"',
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
