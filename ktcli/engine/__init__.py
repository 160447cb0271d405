"""Engines, which turn ids into ids: loading, prefill, decode, sampling. They know nothing of text."""

from ktcli.engine.contract import Engine
from ktcli.engine.cpu import CpuEngine
from ktcli.engine.request import Answer, Finish, Finished, GenerationRequest, PromptRead, Token
from ktcli.engine.scheduler import Limits, Scheduler
from ktcli.engine.sequence import Sequence
from ktcli.engine.session import Session

__all__ = [
    "Answer",
    "CpuEngine",
    "Engine",
    "Finish",
    "Finished",
    "GenerationRequest",
    "Limits",
    "PromptRead",
    "Scheduler",
    "Sequence",
    "Session",
    "Token",
]
