"""Evaluates the results of a hub search: whether kt can run a repository's architecture, and whether it fits a
machine.

Only the `config.json` of each is read. It says less than the headers that a pull looks at before its first byte, so a
model that looks sound here may still be refused there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ktcli.assembly.request import Wanted
from ktcli.errors import BadCheckpoint, NotEnoughMemory, UsageError
from ktcli.models import build
from ktcli.planner.host import Host
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.records import dataclass
from ktcli.store import catalog
from ktcli.store.hubsearch import CONFIG, FoundConfig, Hit, read_configs
from ktcli.store.retrying import Tell, silent
from ktcli.weights.checkpoint import MAX_CONFIG_BYTES
from ktcli.weights.documents import parse_object
from ktcli.weights.recipe import Recipe
from ktcli.weights.scheme import usual_experts

_LONGEST_TYPE = 40


@dataclass(frozen=True, slots=True)
class Judged:
    """A repository of a hub, and whether this machine can run it.

    Attributes:
        model_type: of its config; empty: it has none that could be read.
        parameters: those of the model that its config describes; 0: unknown.
        plan: where it would go; None: kt cannot run it, or nobody can say.
        reason: why there is no plan.
    """

    hit: Hit
    model_type: str = ""
    parameters: int = 0
    plan: Plan | None = None
    reason: str = ""

    @property
    def known(self) -> str:
        """The name that the repository's model has in the catalogue; empty: it is not in the catalogue."""
        profile = catalog.by_repository(self.hit.hub, self.hit.repository)
        return profile.name if profile else ""

    @property
    def fits(self) -> bool:
        """Whether the repository's model has a plan on this machine that fits into memory."""
        return self.plan is not None and self.plan.fits


def judge(hits: Sequence[Hit], host: Host, tell: Tell = silent) -> Iterator[Judged]:
    """Yields for each repository that a hub found, in their order, whether this machine can run its model: the plan
    made from its config.json, or the reason why there is none.

    Args:
        tell: is given a sentence when a hub is waited for, from any thread.
    """
    for found in read_configs(hits, MAX_CONFIG_BYTES, tell):
        yield _judged(found, host)


def _judged(found: FoundConfig, host: Host) -> Judged:
    hit = found.hit
    if not found.data:
        reason = found.problem or f"its {CONFIG} is empty"
        if hit.gguf and found.problem == f"no {CONFIG}":
            reason = "GGUF: kt pull lists its quants"
        return Judged(hit, reason=reason)
    try:
        config = parse_object(found.data, CONFIG)
    except BadCheckpoint:
        return Judged(hit, reason=f"its {CONFIG} cannot be read")
    said = config.get("model_type")
    kind = said[:_LONGEST_TYPE] if isinstance(said, str) else ""
    try:
        return _planned(hit, kind, config, host)
    except (UsageError, NotEnoughMemory) as error:
        return Judged(hit, kind, reason=str(error))
    except BadCheckpoint as error:
        unknown = "unknown architecture" in str(error)
        return Judged(hit, kind, reason="unknown architecture" if unknown else str(error))


def _planned(hit: Hit, kind: str, config: Mapping[str, Any], host: Host) -> Judged:
    profile = catalog.by_repository(hit.hub, hit.repository)
    model = build(config)
    own = usual_experts(config)  # refuses weights that kt cannot read
    recipe = Recipe.named(*((profile.experts, profile.dense) if profile else (own, None)))
    parameters = sum(tensor.elements for tensor in model.tensors)
    request = Wanted().device.apply(Request(recipe), model.spec)
    return Judged(hit, kind, parameters, place(model, host, request))
