"""The question that a command line of the engine answers: a model on a machine, kt's plan, and what is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ktcli.hardware.machine import Machine
from ktcli.models.model import Model
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.server.sglang.families import ExpertStorage, SglangFamily, family_of, stored_of


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that is served with a model.

    Attributes:
        on_experts: whether it changes routed experts.
    """

    name: str
    path: str
    on_experts: bool = False


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """The user's options for the engine that the plan does not contain.

    Attributes:
        model_path: the checkpoint.
        weight_path: kt-kernel's own conversion, for the methods that need one; empty: none was given.
        method: of the experts on the CPU; empty: by how the checkpoint stores them.
        key, admin_key: what clients have to show, and what is to be shown to change the server; empty: nothing.
        streams: requests that are answered together.
        experts: of a layer on the GPUs; None: as the plan and the memory say.
        store: the address of a Mooncake store, "mooncake://HOST:PORT"; empty: none.
        trusts_code: whether the model's repository may run its Python code.
    """

    model_path: str
    name: str
    host: str = "127.0.0.1"
    port: int = 11435
    weight_path: str = ""
    method: str = ""
    key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    streams: int = 4
    experts: int | None = None
    store: str = ""
    adapters: tuple[ServedAdapter, ...] = ()
    trusts_code: bool = False


@dataclass(frozen=True, slots=True)
class ServingQuestion:
    """The inputs of a command line.

    Attributes:
        config: the model's config.json.
        architectures: the classes of models that the engine has.
        gpus: those that may be used; (): all of the machine.
        code: why the model needs Python code of its repository, as its files say; empty: they do not.
    """

    model: Model
    config: Mapping[str, Any]
    machine: Machine
    plan: Plan
    options: SglangOptions
    architectures: Sequence[str]
    gpus: tuple[int, ...] = ()
    code: str = ""

    @property
    def family(self) -> SglangFamily:
        """SGLang's options for the family of the model, such as its parsers."""
        return family_of(self.config)

    @property
    def stored(self) -> ExpertStorage:
        """The format in which the checkpoint stores its experts. Raises: UsageError: as `stored_of`."""
        return stored_of(self.config)
