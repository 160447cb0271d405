"""The kernels that an engine's steps run with: the fastest that nothing is known against, and what failed so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktcli.engine.device.fallbacks import Failures, KnownFailures
from ktcli.errors import KernelFails
from ktcli.ops.torch.kernels import (
    TORCH,
    Kernels,
    early_starts_fail,
    kernels_fail,
    kernels_for,
    start_late,
    triton_fails,
)


class KernelChoice:
    """The kernels of an engine, and the faster ways that fail on its devices.

    Args:
        known: what is known to fail, and who is told of more.
        devices: those of the layers; the first one is tried.
        exact: whether activations are f32: then nothing is tried.
    Attributes:
        kernels: those that steps run with.
        refused: why steps are not captured; a list, for what makes them refers to no engine.
    """

    def __init__(
        self, known: KnownFailures, devices: Sequence[torch.device], *, exact: bool
    ) -> None:
        self.known, self._kept = known, known.known
        self.refused = [known.known.graphs] if known.known.graphs else []
        self._device = devices[0]
        self._lacks = self._kernels_fail = ""
        self.kernels = kernels_for(devices[0], exact=True) if exact else self._fastest(devices)

    def _fastest(self, devices: Sequence[torch.device]) -> Kernels:
        """The fastest kernels that are not known to fail."""
        known = self.known.known
        if known.kernels:
            self._kernels_fail = known.kernels
            return TORCH
        for device in dict.fromkeys(devices) if known.early else ():
            start_late(device, known.early)
        if self._device.type == "cuda":
            self._lacks = triton_fails(self._device)
            self._kernels_fail = kernels_fail(self._device)
        return kernels_for(self._device)

    def do_without(self, failed: KernelFails) -> None:
        """Replaces the kernels by plain torch operations, because of the error `failed`.

        Raises:
            KernelFails: `failed` itself, if plain operations were in use already.
        """
        if self.kernels is TORCH:
            raise failed
        self.kernels, self._kernels_fail = TORCH, str(failed)

    @property
    def failures(self) -> Failures:
        """The faster methods (Triton's kernels, early launches, captured steps) that are known to fail on the devices,
        each with its reason, whether known from the start or found by now.
        """
        early = self.known.known.early or early_starts_fail(self._device)
        return Failures(self._kernels_fail, early, self.refused[0] if self.refused else "")

    @property
    def has_news(self) -> bool:
        """Whether failures were found since they were last stored for later engines."""
        return self.failures != self._kept

    def keep(self) -> None:
        """Stores the failures known by now for later engines, through the callback of `KnownFailures`."""
        self._kept = self.failures
        self.known.keep(self._kept)

    def sentences(self) -> tuple[str, ...]:
        """Returns the warnings for the user about the faster methods that fail, one sentence each."""
        return tuple(self.known.sentences(self.failures, self._lacks))
