"""Ids in, ids out: loading, prefill, decode, sampling. Knows nothing of text."""

from ktcli.engine.cpu import Engine, Options
from ktcli.engine.session import Session

__all__ = ["Engine", "Options", "Session"]
