"""The picture of the house stays true: imports go down only, and starting kt loads nothing heavy.

The direction is read from the syntax trees, so an import inside a function or under TYPE_CHECKING
counts like any other. What a command loads is read from the interpreter itself.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path

import pytest

import ktcli

PACKAGE = Path(ktcli.__file__).parent
NATIVE = Path(__file__).resolve().parent.parent / "native"

# From the bottom up. A part imports parts of lower levels; inside one level only itself, except on
# the floor. `output` belongs to the commands.
LEVELS = [
    {
        "__init__",
        "_native",
        "certificates",
        "config",
        "errors",
        "ggufname",
        "holes",
        "homes",
        "interrupt",
        "unsupported",
        "manifest",
        "native",
        "numbered",
        "pagelabel",
        "records",
        "resources",
        "sampling",
        "settings",
        "settingsfile",
        "smallfiles",
        "terminaltext",
        "threadpool",
        "threads",
    },
    {"ops"},
    {"layers"},
    {"models"},
    {"weights", "planner"},
    {"adapters"},
    {"engine", "text"},
    {"measure"},
    {"training"},
    {"answers"},
    {"client"},
    {"dialogue"},
    {"samples"},
    {"chat"},
    {"terminal"},
    {"assembly"},
    {"finetune"},
    {"server", "api"},
    {"judging"},
    {"commands", "output"},
    {"main"},
    {"start"},
    {"__main__"},
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
FLOOR = LEVELS[0]

# These two stand beside: they know only the floor, and only these parts know them. The engine
# does not: what it needs of the machine is in its plan.
TALK = {"text", "answers", "dialogue", "chat", "terminal"}
ABOVE = {
    "measure",
    *TALK,
    "client",
    "samples",
    "server",
    "assembly",
    "finetune",
    "api",
    "judging",
    "commands",
    "output",
    "main",
}
BESIDE = {"hardware": ABOVE | {"hardware", "planner"}, "store": ABOVE | {"store"}}
# The planner says where bytes go, and the number formats say how many there are.
SIDEWAYS = {
    ("planner", "weights"),
    ("commands", "output"),
    ("output", "commands"),
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    """`ktcli.layers.moe` -> `layers`; the package itself -> `__init__`."""
    return [*module.split("."), "__init__"][1]


def is_part(module: str) -> bool:
    return module == "ktcli" or module.startswith("ktcli.")


@cache
def syntax(module: str) -> ast.Module:
    path = MODULES[module]
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imported(module: str, *, at_start: bool = False) -> frozenset[str]:
    """The modules of the package that `module` names in an import.

    Args:
        at_start: leave out what only runs later or never (functions, TYPE_CHECKING).
    """
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from ktcli.layers import moe` names a module, `... import Moe` something in one.
            names.update(
                full if (full := f"{base}.{alias.name}") in MODULES else base
                for alias in node.names
            )
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if not (at_start and later):
                visit(child)

    visit(syntax(module))
    return frozenset(name for name in names if is_part(name)) - {module}


def allowed(importer: str, target: str) -> bool:
    """Whether a module of part `importer` may import one of part `target`."""
    if importer == target or target in FLOOR:
        return True
    if target in BESIDE:
        return importer in BESIDE[target]
    if importer in BESIDE:  # neither floor nor beside
        return False
    return (importer, target) in SIDEWAYS or LEVEL_OF[target] < LEVEL_OF[importer]


def test_every_part_has_its_place():
    parts = {part_of(module) for module in MODULES}
    assert parts - set(LEVEL_OF) - set(BESIDE) == set()


def test_imports_go_down():
    """No module imports one from above or from beside."""
    upward = {
        module: sorted(t for t in imported(module) if not allowed(part_of(module), part_of(t)))
        for module in MODULES
    }
    assert {module: targets for module, targets in upward.items() if targets} == {}


def circle(needs: Mapping[str, Set[str]]) -> list[str]:
    """Modules that need one another in turn, the first again at the end; [] if there are none."""
    done: set[str] = set()

    def follow(module: str, trail: tuple[str, ...]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module not in done:
            for target in sorted(needs[module]):
                if found := follow(target, (*trail, module)):
                    return found
            done.add(module)
        return []

    return next((found for module in needs if (found := follow(module, ()))), [])


def test_no_module_needs_itself_to_start():
    assert circle({m: imported(m, at_start=True) & set(MODULES) for m in MODULES}) == []


@pytest.mark.parametrize("part", sorted({part_of(module) for module in MODULES}))
def test_no_part_has_a_circle_inside(part: str):
    """Imports inside functions and under TYPE_CHECKING count too: they hide a circle, they do not open it."""
    inside = {module for module in MODULES if part_of(module) == part}
    assert circle({module: imported(module) & inside for module in inside}) == []


def test_no_two_classes_have_one_name():
    """One word, one idea: whoever reads a name knows which class is meant."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(syntax(module)):
            if isinstance(node, ast.ClassDef) and module != "ktcli._native":
                found.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_data_classes_are_those_that_are_made_quickly():
    """A start makes three hundred; see `ktcli.records`."""
    slow = [
        module
        for module in MODULES
        for node in ast.walk(syntax(module))
        if isinstance(node, ast.ImportFrom)
        and node.module == "dataclasses"
        and "dataclass" in {alias.name for alias in node.names}
    ]
    # One line of it is for checkers of types.
    assert slow == ["ktcli.records"]


# --- C files --------------------------------------------------------------------------------------

C_SOURCES = {
    path: re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path in sorted(NATIVE.rglob("*.[ch]"))
    if path.parent.name != "tests"
}
# A definition begins a line, and its body is not on the same one.
FUNCTION = re.compile(r"^(?!static\b|typedef\b)\w[\w *]*?\b(\w+)\([^;{}]*\)\s*\{$", re.MULTILINE)


def test_c_files_include_in_no_circle():
    by_name = {path.name: path.name for path in C_SOURCES}
    needs = {
        path.name: {by_name[n.rpartition("/")[2]] for n in re.findall(r'#include "(.+\.h)"', text)}
        for path, text in C_SOURCES.items()
    }
    assert needs["mla.h"] == {"attention.h"}
    assert circle(needs) == []


def test_c_files_call_in_no_circle():
    """A file whose functions another calls, directly or not, calls none of that one's."""
    files = {path.name: text for path, text in C_SOURCES.items() if path.suffix == ".c"}
    home = {made: name for name, text in files.items() for made in FUNCTION.findall(text)}
    needs = {
        name: {home[word] for word in re.findall(r"\w+", text) if word in home} - {name}
        for name, text in files.items()
    }
    assert {"program.c", "product.c"} <= needs["linear.c"]
    assert circle(needs) == []


# --- what a command loads -------------------------------------------------------------------------

HEAVY = {"torch", "transformers", "peft", "cpuinfo", "modelscope", "huggingface_hub", "requests"}
PAGES = HEAVY | {"numpy", "tokenizers", "jinja2", "prompt_toolkit", "safetensors", "typer"}
STARTS = [
    (["--help"], PAGES),
    (["--version"], PAGES | {"dataclasses", "inspect", "ktcli.commands.cli.table"}),
    (["list"], HEAVY | {"tokenizers", "jinja2", "prompt_toolkit", "pydantic"}),
    (["doctor"], HEAVY | {"tokenizers", "jinja2", "prompt_toolkit", "pydantic"}),
    (["chat", "kt-mini", "hi"], HEAVY | {"prompt_toolkit", "pydantic"}),
]
# What the first token of a model that is converted can do without: hubs, pulls, conversions, other formats; adapters,
# stores that servers share, GPUs, rules, response templates; pools of threads with futures, which log.
NOT_FOR_A_TOKEN = set(
    "ktcli.assembly.prepare ktcli.assembly.plan ktcli.assembly.subject ktcli.planner.choice ktcli.store.hubs "
    "ktcli.store.download ktcli.weights.conversion ktcli.weights.reader ktcli.terminal.replstate ktcli.terminal.slash "
    "ktcli.answers.grammar.compiler ktcli.server rich pygments statistics numpy.ma asyncio "
    "ktcli.assembly.convert ktcli.weights.checkpoint ktcli.weights.storage ktcli.store.adapters tarfile "
    "ktcli.assembly.kvshared ktcli.store.mooncake ktcli.store.engines ktcli.planner.hybrid ktcli.planner.levers "
    "ktcli.planner.constraints ktcli.answers.templates concurrent.futures logging".split()
)


def loaded_by(arguments: list[str], home: Path) -> tuple[set[str], int]:
    """The modules that `kt ARGUMENTS` imports, and its exit code."""
    script = "from ktcli.main import run; raise SystemExit(run())"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script, *arguments],
        env={**os.environ, "KT_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # A line reads `import time:  self |  cumulative | name`.
    names = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "ktcli" in names, done.stderr
    return names, done.returncode


@pytest.mark.skipif("ktcli.main" not in MODULES, reason="there is no command line in this tree")
@pytest.mark.parametrize(("arguments", "unwanted"), STARTS, ids=[s[0][0] for s in STARTS])
def test_start_loads_nothing_heavy(arguments: list[str], unwanted: set[str], tmp_path: Path):
    names, code = loaded_by(arguments, tmp_path)
    # Exit code 2 of `kt doctor` is a verdict on the machine; everything else must succeed.
    assert code in ({0, 1, 2} if arguments == ["doctor"] else {0})
    assert names & unwanted == set()
    if arguments[0] == "chat":  # that made the conversion; the next one finds it
        again, code = loaded_by(arguments, tmp_path)
        assert code == 0 and again & (unwanted | NOT_FOR_A_TOKEN) == set()
