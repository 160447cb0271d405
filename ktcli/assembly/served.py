"""Tells what a server of a model would keep in its cache, and how fast it reads prompts, without loading the model."""

from __future__ import annotations

from ktcli import config
from ktcli.assembly.kvpages import cache_quota
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.plan import plan_subject
from ktcli.assembly.request import DeviceWords, Wanted, placement_here
from ktcli.assembly.subject import Subject
from ktcli.errors import UsageError
from ktcli.hardware import measured
from ktcli.hardware.cpu import read_cpu
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.probe import SYSTEM_ROOT
from ktcli.models import build
from ktcli.native import PAGE_TOKENS
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.settings import SETTINGS
from ktcli.store import experience, places


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """The facts about `kt serve` of a model on this machine, from its plan.

    Attributes:
        plan: the plan; it may not fit.
        token_bytes: the bytes of a token in its pages.
        memory_tokens: the tokens of all pages in memory.
        disk_bytes: the most bytes of pages on disk.
        prompt_tok_s: the tokens of a prompt that it computes in a second.
        is_measured: whether that speed was measured here, by an earlier run; else it is predicted.
    """

    plan: Plan
    token_bytes: int
    memory_tokens: int
    disk_bytes: int
    prompt_tok_s: float
    is_measured: bool


def served_facts(subject: Subject, listener: Listener = SILENT) -> ServedFacts:
    """Returns the plan of a model under `kt serve` on this machine with the current settings, the sizes of its KV
    cache, and the speed at which it reads prompts.

    Raises:
        UsageError: the model has no KV pages. Others: as `plan_subject`.
    """
    spec = build(subject.config).spec
    wanted = Wanted(
        config.value("context"),
        cache=config.value("kv"),
        streams=config.value("parallel") or int(SETTINGS["parallel"].default),
        served=True,
        device=DeviceWords(config.value("device") or AUTO, placement=placement_here()),
    )
    plan = plan_subject(subject, wanted, listener=listener)
    token_bytes, _ = plan.use.kind_bytes(spec)
    if not token_bytes:
        raise UsageError(
            f"{subject.name} has no layer whose cache grows with the conversation",
            hint="name another model, or use --bytes-per-token and --speed",
        )
    known = _measured_rate(subject, plan)
    return ServedFacts(
        plan,
        token_bytes,
        PAGE_TOKENS * plan.use.pages(plan.context),
        cache_quota(),
        known or plan.speed.prefill,
        known is not None,
    )


def _measured_rate(subject: Subject, plan: Plan) -> float | None:
    """Returns the speed that earlier runs measured; None: there were none, or they had a GPU."""
    if subject.pack is None or plan.device is not None:
        return None
    cpu = measured.key(read_cpu(SYSTEM_ROOT, ()).model, plan.host.threads, plan.host.isa)
    return experience.recall_prompt_rate(places.conversion_name(subject.pack), cpu)
