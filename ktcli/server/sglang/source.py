"""Reads the flags of SGLang out of the source of its `server_args.py`, without importing it or anything else.

Only the syntax tree is looked at: the calls of `add_argument` in `ServerArgs.add_cli_args`, the literals that they
name, and the fields of the dataclass for defaults. A name that another module of the package defines is looked up
there. What is no literal is not known, which is None, and not guessed.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktcli.errors import KtError
from ktcli.server.sglang.flags import (
    JSON,
    NUMBER,
    OTHER,
    SWITCH,
    TEXT,
    WHOLE,
    EngineFlag,
    FlagTable,
)

CLASS, METHOD = "ServerArgs", "add_cli_args"
SOURCE = Path("srt") / "server_args.py"  # below the package
_MODELS = Path("srt") / "models"
_ENTRIES = "EntryClass"
_MOST_BYTES = 8 << 20  # of a source file; the real one has 304 kB
_KINDS = {"str": TEXT, "int": WHOLE, "float": NUMBER, "json.loads": JSON}
_SWITCHES = ("store_true", "store_false", "DeprecatedAction")


def read_flags(package: Path, version: str = "") -> FlagTable:
    """Returns the flags of the command line and the model classes of an SGLang package, read from its source.

    Args:
        package: the folder `sglang`, installed or unpacked.
    Raises:
        KtError: a file is missing or damaged, or does not declare the flags as expected.
    """
    return FlagTable(version, flags_in(package / SOURCE, package), architectures_in(package))


def flags_in(file: Path, package: Path) -> tuple[EngineFlag, ...]:
    """Returns the flags of the command line that SGLang's `server_args.py` declares, in its order.

    Args:
        file: the `server_args.py`.
        package: where its imports are looked up.
    Raises:
        KtError: the file cannot be read, or does not declare the flags as expected.
    """
    module = _Module(file, package)
    owner = module.classes.get(CLASS)
    method = next((each for each in _functions(owner) if each.name == METHOD), None)
    if owner is None or method is None:
        raise KtError(f"{file} has no {CLASS}.{METHOD}", hint=_AGAIN)
    fields = _fields(owner, module)
    local = {
        target.id: each.value
        for each in ast.walk(method)
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    flags = [_flag(call, module, fields, local) for call in _calls(method)]
    if not flags:
        raise KtError(f"{file} declares no flags", hint=_AGAIN)
    return tuple(flags)


_AGAIN = "install it again: kt engine rm sglang-kt, then kt engine install sglang-kt"


def architectures_in(package: Path) -> tuple[str, ...]:
    """Returns the names of the model classes that an SGLang package offers, sorted; () where there are none."""
    found = set[str]()
    for file in sorted((package / _MODELS).glob("*.py")):
        with contextlib.suppress(KtError):
            for each in _parsed(file).body:
                if isinstance(each, ast.Assign) and any(
                    isinstance(target, ast.Name) and target.id == _ENTRIES
                    for target in each.targets
                ):
                    found |= {
                        node.id for node in ast.walk(each.value) if isinstance(node, ast.Name)
                    }
    return tuple(sorted(found))


def _flag(
    call: ast.Call,
    module: _Module,
    fields: Mapping[str, Any],
    local: Mapping[str, ast.expr],
) -> EngineFlag:
    """Returns the flag that a call of add_argument declares."""
    said = {each.arg: each.value for each in call.keywords if each.arg}
    names = tuple(module.value(each) or "" for each in call.args)
    choices = module.value(local.get(_name(said.get("choices")), said.get("choices")))
    default = said.get("default")
    if isinstance(default, ast.Attribute) and _name(default.value) == CLASS:
        value = fields.get(default.attr)
    else:
        value = module.value(default)
    return EngineFlag(
        names,
        _kind(said),
        str(module.value(said.get("nargs")) or ""),
        None
        if choices is None
        else tuple(sorted(choices) if isinstance(choices, set) else choices),
        value,
        bool(module.value(said.get("required"))),
    )


def _kind(said: Mapping[str, ast.expr]) -> str:
    action = said.get("action")
    word = action.value if isinstance(action, ast.Constant) else _name(action)
    if word in _SWITCHES:
        return SWITCH
    if "type" not in said:
        return OTHER if action is not None else TEXT
    return _KINDS.get(ast.unparse(said["type"]), OTHER)


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _calls(method: ast.FunctionDef) -> Iterator[ast.Call]:
    """Yields the calls of add_argument in a method, in their order."""
    found = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
    ]
    yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _functions(owner: ast.ClassDef | None) -> Iterator[ast.FunctionDef]:
    for each in owner.body if owner else ():
        if isinstance(each, ast.FunctionDef):
            yield each


def _fields(owner: ast.ClassDef, module: _Module) -> dict[str, Any]:
    """Returns the defaults of a dataclass's fields; None where one is no literal."""
    return {
        each.target.id: module.value(each.value)
        for each in owner.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _parsed(file: Path) -> ast.Module:
    """Returns the syntax tree of a file. Raises: KtError: it cannot be read."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise KtError(f"{file} is too large", hint=_AGAIN)
        return ast.parse(file.read_bytes())
    except OSError as error:
        raise KtError(f"cannot read {file}: {error.strerror}", hint=_AGAIN) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise KtError(f"{file} is damaged: {str(error)[:200]}", hint=_AGAIN) from error


class _Module:
    """A source file, and the literals that its expressions mean."""

    def __init__(self, file: Path, package: Path) -> None:
        self._package, self.classes = package, dict[str, ast.ClassDef]()
        self._values, self._imports = dict[str, ast.expr](), dict[str, str]()
        self._others = dict[str, _Module | None]()
        for each in _parsed(file).body:
            if isinstance(each, ast.ClassDef):
                self.classes[each.name] = each
            elif isinstance(each, ast.ImportFrom) and each.module:
                self._imports |= {name.asname or name.name: each.module for name in each.names}
            elif isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                self._values |= {t.id: each.value for t in targets if isinstance(t, ast.Name)}

    def value(self, node: ast.expr | None) -> Any:
        """Returns the literal that an expression means; None: it is none."""
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return self._several(node.elts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(node.left), self.value(node.right)
            return left + right if isinstance(left, list) and isinstance(right, list) else None
        if isinstance(node, ast.Call):
            return self._called(node)
        try:
            return None if node is None else ast.literal_eval(node)
        except (ValueError, TypeError):
            return None

    def _several(self, nodes: list[ast.expr]) -> list[Any] | None:
        found = list[Any]()
        for each in nodes:
            inner = self.value(each.value if isinstance(each, ast.Starred) else each)
            if inner is None:
                return None
            found += inner if isinstance(each, ast.Starred) else [inner]
        return found

    def _called(self, node: ast.Call) -> Any:
        """The value of list(X), of X.KEYS.keys(), and of a dataclass's field(default=X); of other calls it is not
        known."""
        if isinstance(node.func, ast.Name) and node.func.id in ("list", "sorted", "set"):
            return self.value(node.args[0]) if len(node.args) == 1 else None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "keys" and not node.args:
            return self._keys(node.func.value)
        if ast.unparse(node.func) in ("field", "dataclasses.field"):
            return next((self.value(k.value) for k in node.keywords if k.arg == "default"), None)
        return None

    def _keys(self, node: ast.expr) -> list[Any] | None:
        """The keys of a dictionary that is an attribute of a class, here or in another module."""
        if not isinstance(node, ast.Attribute):
            return None
        name = _name(node.value)
        where = self if name in self.classes else self._other(name)
        owner = where.classes.get(name) if where else None
        for each in owner.body if owner else ():
            targets = each.targets if isinstance(each, ast.Assign) else []
            if isinstance(each, ast.AnnAssign):
                targets = [each.target]
            if any(_name(target) == node.attr for target in targets) and isinstance(
                each, (ast.Assign, ast.AnnAssign)
            ):
                table = each.value
                keys = table.keys if isinstance(table, ast.Dict) else []
                return [key.value for key in keys if isinstance(key, ast.Constant)] or None
        return None

    def _named(self, name: str) -> Any:
        if name in self._values:
            return self.value(self._values[name])
        other = self._other(name)
        return None if other is None else other.value(ast.Name(name))

    def _other(self, name: str) -> _Module | None:
        """The module of the package that a name is imported from; None: it is of none, or cannot be read."""
        module = self._imports.get(name, "")
        if module not in self._others:
            parts = module.split(".")
            file = self._package.joinpath(*parts[1:]).with_suffix(".py")
            self._others[module] = None
            if parts[0] == self._package.name and len(parts) > 1 and file.is_file():
                with contextlib.suppress(KtError):
                    self._others[module] = _Module(file, self._package)
        return self._others[module]
