"""Lets a command declare options that belong together as one parameter: a dataclass with a field for each option."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, get_type_hints


def with_option_groups(
    command: Callable[..., None], without: Collection[str] = ()
) -> Callable[..., None]:
    """Returns a command that has the options of each group one by one, in place of the parameter that is the group.

    Args:
        without: names of options that it does not have.
    """
    shape, parameters = signature(command, eval_str=True), list[Parameter]()
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for own in shape.parameters.values():
        group = own.annotation
        if not is_dataclass(group):
            parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(group, include_extras=True)
        options = [each for each in fields(group) if each.name not in without]
        parameters += [
            own.replace(name=each.name, default=each.default, annotation=hints[each.name])
            for each in options
        ]
        groups[own.name] = group, [each.name for each in options]  # type: ignore[assignment]

    def run(**given: Any) -> None:
        made = {
            name: group(**{each: given.pop(each) for each in options})
            for name, (group, options) in groups.items()
        }
        command(**given, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = shape.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
