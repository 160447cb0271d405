"""Tells whether torch can use a GPU here, or why not, before anything is loaded."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

INSTALL = "pip install 'ktcli[gpu]' installs the torch that GPUs need"


def why_not(torch_name: str = "torch") -> str:
    """Returns the reason why torch cannot use a GPU, as one clause: "torch is not installed (…)"; "" if it can.

    Args:
        torch_name: the module, for tests.
    """
    try:
        torch: Any = importlib.import_module(torch_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == torch_name
        why = "is not installed" if missing else f"cannot be loaded: {_first_line(error)}"
        return f"torch {why} ({INSTALL})"
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is a build without CUDA ({INSTALL})"
    # torch reports a fault of the driver in a warning, and then sees no device.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            usable = torch.cuda.is_available() and torch.cuda.device_count() > 0
        # The latter of nonsense in CUDA_VISIBLE_DEVICES.
        except (RuntimeError, ValueError) as error:
            return f"torch cannot tell which GPUs there are: {_first_line(error)}"
    if usable:
        return ""
    reasons = [_first_line(each.message) for each in said if "CUDA" in str(each.message)]
    if any("too old" in reason for reason in reasons):
        return (
            f"the NVIDIA driver is too old for torch's CUDA {torch.version.cuda}"
            " (update the driver, or install a torch made for an older CUDA)"
        )
    return f"torch sees no GPU: {reasons[0]}" if reasons else "torch sees no GPU"


def _first_line(what: object) -> str:
    lines = str(what).strip().splitlines()
    return lines[0][:200] if lines else ""
