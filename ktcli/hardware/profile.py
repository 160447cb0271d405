"""A machine as a file: TOML written by hand, or the JSON that `kt doctor --record` writes and `--json` prints.

    kt doctor --record server.json      on the server
    kt plan kimi-k2 --machine server.json      anywhere
    kt plan kimi-k2 --machine xeon-2x32-512gb  one of profiles/machines
    kt plan kimi-k2 --machine 'cpu=2x8452Y ram=512G gpu=4090'  described

Core numbers are written in the kernel's notation ("0-31"). Keys that are not fields are refused, so that
a typing error is not taken for a machine without that part.
"""

from __future__ import annotations

import json
import stat
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import NotFound, UsageError
from ktcli.hardware.described import described, is_described
from ktcli.hardware.machine import Gpu, Machine
from ktcli.hardware.text import cpu_list, cpu_text
from ktcli.resources import data_path

MAX_BYTES = 1 << 16  # ten times the largest; a TOML parser takes quadratic time
MAX_NUMBER = 1e18  # bytes, or operations per second


def document(machine: Machine) -> dict[str, Any]:
    """Returns the machine as a JSON object with the fields of `Machine` by name, in which core numbers are text
    ("0-31"); `from_document` is the inverse.
    """
    found = asdict(machine)
    for name in ("cores", "efficient"):
        found["cpu"][name] = cpu_text(found["cpu"][name])
    for node, row in zip(machine.nodes, found["nodes"], strict=True):
        row["cores"] = cpu_text(node.cores)
    return found


def from_document(found: Mapping[str, Any]) -> Machine:
    """Returns the machine that a parsed machine file (JSON or TOML) describes; the inverse of `document`.

    Raises:
        ValueError: a field is missing, unknown, of the wrong type or implausible; the message names it.
    """
    _check_cores(found)
    machine = _build(Machine, found, "the file")
    assert isinstance(machine, Machine)
    if strange := sorted(set(machine.cpu.efficient) - set(machine.cpu.cores)):
        raise ValueError(f"cpu.efficient lists {strange[0]}, which is not one of its cores")
    rates = machine.measured
    if rates and min(rates.threads, rates.read_bps, rates.int8_ops, rates.bf16_ops) < 1:
        raise ValueError("measured has a rate or a number of threads below 1")
    for gpu in machine.gpus:
        _check_gpu(gpu)
    numbers = [node.id for node in machine.nodes]
    cores = [core for node in machine.nodes for core in node.cores]
    gpus = [gpu.index for gpu in machine.gpus]
    for where, name, ids in (
        ("nodes", "node", numbers),
        ("nodes", "core", cores),
        ("gpus", "index", gpus),
    ):
        number, times = (Counter(ids).most_common(1) or [(0, 0)])[0]
        if times > 1:
            raise ValueError(f"{where} lists {name} {number} twice")
    return machine


def _check_gpu(gpu: Gpu) -> None:
    for name in ("link_bps", "read_bps", "bf16_ops", "copy_bps"):
        rate = getattr(gpu, name)
        if rate is not None and rate < 1:
            raise ValueError(f"GPU {gpu.index} has {name} below 1; omit unknown values")
    if gpu.free_bytes > gpu.vram_bytes:
        raise ValueError(f"GPU {gpu.index} has more free memory than total memory")


def _check_cores(found: Any) -> None:
    """Stops at the first core that is listed twice, before the nodes are made: a short file could list all cores a
    thousand times."""
    nodes = found.get("nodes") if isinstance(found, Mapping) else None
    seen: set[int] = set()
    for row in nodes if isinstance(nodes, list) else ():
        text = row.get("cores") if isinstance(row, Mapping) else None
        cores = _cores(text, "cores of a node") if isinstance(text, str) else ()
        if not seen.isdisjoint(cores):
            raise ValueError(f"nodes lists core {min(seen.intersection(cores))} twice")
        seen.update(cores)


def read_machine(path: Path) -> Machine:
    """Returns the machine that `path` names: a machine file (JSON or TOML), the name of one in `profiles/machines`, or
    a description such as "cpu=2x8452Y ram=512G".

    Raises:
        NotFound: the file does not exist or cannot be read; the hint names the machines that ship with kt.
        UsageError: the file or text does not describe a machine.
    """
    if is_described(str(path)):
        return described(str(path))
    known = shipped()
    try:
        if str(path) in known and not path.exists():
            path = known[str(path)]
        if stat.S_ISFIFO(path.stat().st_mode) and not str(path).startswith(("/dev/", "/proc/")):
            raise UsageError(f"{path} is a named pipe, not a machine file")  # nobody may ever write
        data = smallfiles.read_start(path, MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(
            f"cannot read the machine file {str(path)[:300]}: {error.strerror}",
            hint=f"machines that ship with kt: {', '.join(sorted(known))}",
        ) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is too large for a machine file")
    try:
        text = data.decode("utf-8")
        found: Any = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        if isinstance(found, dict) and isinstance(found.get("machine"), dict):
            found = found["machine"]
        return from_document(found)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} does not describe a machine: {str(error)[:200]}",
            hint="make one with: kt doctor --record machine.json",
        ) from error


def shipped() -> dict[str, Path]:
    """Returns the paths of the machine files in `profiles/machines`, which come with kt, by file name without ".toml";
    empty if that folder is missing.
    """
    try:
        return {path.stem: path for path in data_path("profiles", "machines").glob("*.toml")}
    except FileNotFoundError:
        return {}


def _build(kind: type, found: Any, where: str) -> object:
    """Builds an object of a dataclass from a mapping."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} is not a table")
    assert is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(map(str, found)) - set(known))
    if unknown:
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}")
    values = {
        name: _value(
            hints[name],
            found[name],
            f"{where}: {name}" if where == "the file" else f"{where}.{name}",
        )
        for name in known
        if name in found
    }
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).split(":")[-1].strip()
        raise ValueError(f"{where} lacks {missing}") from None


def _value(hint: Any, found: Any, where: str) -> object:
    """Converts `found` to a type after checking it."""
    arms = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        if found is None and type(None) in arms:
            return None
        return _value(next(arm for arm in arms if arm is not type(None)), found, where)
    if typing.get_origin(hint) is tuple:
        if arms[0] is int and isinstance(found, str):
            return _cores(found, where)
        if not isinstance(found, list | tuple):
            raise ValueError(f"{where} is not a list")
        return tuple(_value(arms[0], each, f"{where}[{i}]") for i, each in enumerate(found))
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, found, where)
    if isinstance(found, int | float) and not abs(found) < MAX_NUMBER:  # NaN, too
        raise ValueError(f"{where} is {str(found)[:40]}, which is implausible")
    if hint is float and isinstance(found, int) and not isinstance(found, bool):
        return float(found)
    if not isinstance(found, hint) or (hint is int and isinstance(found, bool)):
        raise ValueError(f"{where} is {str(found)[:40]!r}, which is not {_NAMES[hint]}")
    if hint in (int, float) and found < 0:
        raise ValueError(f"{where} is {found}, which is below zero")
    return typing.cast(object, found)


def _cores(text: str, where: str) -> tuple[int, ...]:
    try:
        return cpu_list(text)
    except ValueError:
        raise ValueError(
            f"{where} is {text[:40]!r}, which is not a list of CPUs like 0-15,32"
        ) from None


_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
