"""Compares an adapter's tensors with the targets that adapter_config.json lists, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ktcli.adapters.adapter import LoraPair
from ktcli.adapters.patterns import ends_of, matcher
from ktcli.adapters.settings import ALL_LINEAR, CONFIG, AdapterSettings
from ktcli.adapters.targets import Targets, without_number
from ktcli.errors import BadCheckpoint
from ktcli.ops.part import ModelPart
from ktcli.weights.storage import Part

# What peft adds to rank_pattern when it takes gate_proj and up_proj, wherever they are, for those of routed experts.
_REMAPPED = r".*\.gate_up_proj"
_SHARED = "shared_expert"
OTHER_BASE = "if it was trained on another model, name that model: --base MODEL"


class ListedTargets:
    """The targets of a config, with a record of which of them have tensors."""

    def __init__(self, settings: AdapterSettings, targets: Targets) -> None:
        self.settings, self.targets = settings, targets
        self._modules = frozenset(() if isinstance(settings.modules, str) else settings.modules)
        self._parameters = frozenset(settings.parameters)
        self._used: set[str] = set()
        self._matches: Callable[[str], bool] | None = None
        self._is_expression = isinstance(settings.modules, str)
        if isinstance(settings.modules, str):
            self._is_expression = settings.modules.lower() != ALL_LINEAR
            self._matches = matcher(settings.modules) if self._is_expression else None

    def key(self, module: str, part: Part) -> str:
        """Returns the name by which `rank_pattern` and `alpha_pattern` of adapter_config.json know a module:
        "MODULE.weight" where this is a target parameter, else the module's own name.

        Raises:
            BadCheckpoint: adapter_config.json lists no such target.
        """
        parameter = f"{module}.weight"
        if self._is_parameter(parameter):
            return parameter
        if self._is_module(module):
            return module
        raise self._beyond(part)

    def fused_key(self, name: str, part: Part) -> str:
        """Returns `name`, which names a parameter with the matrices of all experts, also in `rank_pattern` and
        `alpha_pattern`, after checking that adapter_config.json lists it as a target.

        Raises:
            BadCheckpoint: adapter_config.json lists no such target.
        """
        if self._is_parameter(name):
            return name
        self._refuse_shared(name)
        raise self._beyond(part)

    def cover(self, name: str) -> None:
        """Records that the target `name` has factors, so that `notes` does not report it as untrained;
        adapter_config.json need not list it.
        """
        self._used.update(ends_of(name))

    def lists_parameter(self, name: str) -> bool:
        """Returns whether adapter_config.json lists a parameter in `target_parameters`, by its whole name or by an end
        of it.
        """
        return any(end in self._parameters for end in ends_of(name))

    def notes(self, pairs: Iterable[LoraPair]) -> tuple[str, ...]:
        """Returns sentences for the user about differences between adapter_config.json and the adapter's tensors, such
        as a target for which there are none; () if there are none. To be called after all targets have been looked up.

        Raises:
            BadCheckpoint: adapter_config.json lists a target that the base model does not have.
        """
        said = []
        if self._is_expression and self._matches is None:
            said.append(
                f"{CONFIG}: kt does not evaluate the regular expression in target_modules, so it cannot check "
                "whether it matches the modules in the file"
            )
        fused = [pair for pair in pairs if pair.target.is_fused]
        for name in sorted((self._modules | self._parameters) - self._used):
            if fused:
                self._refuse_shared(name)
            if not self._exists(name):
                raise BadCheckpoint(
                    f"{CONFIG} lists the target {name[:100]!r}, which the base model does not have",
                    hint="if the adapter was trained on another model, name that model: --base MODEL; "
                    f"otherwise, remove the target from {CONFIG}",
                )
            said.append(f"{CONFIG} lists {name}, but nothing was trained there")
        return (*said, *self._remapped(fused, list(pairs)))

    def _remapped(self, fused: list[LoraPair], pairs: list[LoraPair]) -> list[str]:
        """What peft's reading of gate_proj as routed experts left out."""
        if not fused or _REMAPPED not in self.settings.ranks.keys:
            return []
        beside = ModelPart.SHARED, ModelPart.DENSE_MLP
        there = {target.part for target in self.targets.by_name.values()}
        trained = {pair.target.part for pair in pairs}
        left = [part.value for part in beside if part in there - trained]
        if not left:
            return []
        return [
            f"peft trained gate_proj, up_proj and down_proj as routed experts only: nothing was trained in "
            f"{' and '.join(left)}"
        ]

    def _refuse_shared(self, name: str) -> None:
        shared = next((each for each in (*self._modules, name) if _SHARED in each), "")
        if shared and shared not in self._used:
            raise BadCheckpoint(
                f"{CONFIG} lists {shared[:100]}, but the factors are those of routed experts: "
                "peft maps shared experts to routed ones without warning",
                hint="train with target_parameters: ['shared_experts.gate_proj.weight', …]",
            )

    def _is_parameter(self, name: str) -> bool:
        return self._is_among(self._parameters, name)

    def _is_module(self, name: str) -> bool:
        if isinstance(self.settings.modules, str):
            return self._matches is None or self._matches(name)
        return self._is_among(self._modules, name)

    def _is_among(self, listed: frozenset[str], name: str) -> bool:
        """Returns whether ends of a name are listed, which are then used."""
        found = [end for end in ends_of(name) if end in listed]
        self._used.update(found)
        return bool(found)

    def _beyond(self, part: Part) -> BadCheckpoint:
        return BadCheckpoint(
            f"{part.name} in {part.file} is not one of the targets that {CONFIG} lists",
            hint="the two files belong to different adapters, or one of them was changed",
        )

    def _exists(self, name: str) -> bool:
        """Returns whether a target is in the base, as a module, a parameter or a module of each expert."""
        stem = name.removesuffix(".weight")
        end = f".{without_number(stem)[0]}"
        return any(f".{known}".endswith(end) for known in self.targets.known)


def other_base(what: str) -> BadCheckpoint:
    """Returns an error with the message `what`, which says that an adapter does not fit its base model; the hint is
    that it may have been trained on another one.
    """
    return BadCheckpoint(what, hint=OTHER_BASE)
