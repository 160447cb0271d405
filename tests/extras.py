"""Which installed modules an extra of kt does not bring: what a test of `make check` must not import."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from requirements import requirements

# Each new environment has these, and kt itself is not a package that it needs.
ALWAYS = frozenset({"ktcli", "pip", "setuptools"})


def beyond(extra: str) -> frozenset[str]:
    """The top-level modules of the packages here that are not installed with `ktcli[extra]`."""
    there = {canonicalize_name(each.metadata["Name"]): each for each in metadata.distributions()}
    brought = ALWAYS | _closure(extra, there)
    kept = {module for name in brought & there.keys() for module in _modules(there[name])}
    others = {
        module
        for name in there.keys() - brought
        for module in _modules(there[name])
        if module.isidentifier()
    }
    return frozenset(others - kept)


def _closure(extra: str, there: dict[str, metadata.Distribution]) -> set[str]:
    """The names of the packages that `ktcli[extra]` needs, and those need, as pyproject.toml says it now."""
    waiting = [Requirement(each) for each in requirements(extra)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        key = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if key in seen:
            continue
        seen.add(key)
        if key[0] in there:
            waiting.extend(_requirements(there[key[0]], key[1]))
    return {name for name, _ in seen}


def _requirements(package: metadata.Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in package.requires or ():
        found = Requirement(line)
        marker = found.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in {"", *extras}):
            yield found


def _modules(package: metadata.Distribution) -> set[str]:
    """The names that a package's files begin with, but for its own records."""
    return {str(path).partition("/")[0].split(".")[0] for path in package.files or ()}
