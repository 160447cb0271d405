"""Engines: ids in, ids out: loading, prefill, decode, sampling. They know nothing of text."""

from ktcli.engine.contract import Engine
from ktcli.engine.cpu import CpuEngine
from ktcli.engine.sequence import Sequence
from ktcli.engine.session import Session

__all__ = ["CpuEngine", "Engine", "Sequence", "Session"]
