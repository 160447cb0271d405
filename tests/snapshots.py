"""What every command prints, kept as text files in tests/snapshots for people to read when it changes.

    python tests/snapshots.py                     writes them anew
    python tests/snapshots.py --check measured    says what differs of a group, for test_snapshots.py

What is printed is shown by terminals of 80, 40 and 200 columns, by one that can neither draw nor colour (TERM=dumb,
NO_COLOR, LC_ALL=C), and in a pipe; what looks as with 80 columns is not kept again. kt-mini answers alike on every
CPU. Speeds and times become #; the machine that `kt doctor` sees is a recorded one. A line that a terminal had to break
by itself is marked with ⏎: there should be none but for long names.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from rich.text import Text

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from hardware.trees import TREES, build  # noqa: E402

from docs.terminal import (  # noqa: E402
    Shell,
    Shown,
    import_everything,
    masked,
    same_rows,
    ship_to,
    shown_text,
)
from ktcli import resources  # noqa: E402
from ktcli.commands.cli.table import COMMANDS, load  # noqa: E402

KEPT = HERE / "snapshots"
MODELS = ("deepseek-v2-lite", "gpt-oss-120b", "kimi-k2", "kt-mini", "qwen3-0.6b", "qwen3-30b-a3b")
LONG = 2000  # columns of what shows a pipe
PLAIN = {"TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C"}
LOOKS: dict[str, tuple[int, dict[str, str]]] = {
    "80 columns": (80, {}),
    "40 columns": (40, {}),
    "200 columns": (200, {}),
    "TERM=dumb NO_COLOR=1 LC_ALL=C": (80, PLAIN),
    "a pipe": (80, {}),
}
ONE_LOOK, TWO_LOOKS, IN_A_PIPE = ("80 columns",), ("80 columns", "40 columns"), ("a pipe",)


@dataclass(frozen=True)
class Case:
    """Commands whose output is one file.

    Attributes:
        lines: the commands; what one changes the next ones see.
        looks: those of LOOKS that are kept.
        measured: whether speeds and times are printed.
        forks: whether each runs in a process and a real terminal of its own, as computing needs it; the others run in
            this one.
        stands_in: what stands in for a part of kt while the commands run.
    """

    name: str
    lines: tuple[str, ...]
    looks: tuple[str, ...] = tuple(LOOKS)
    measured: bool = False
    forks: bool = False
    stands_in: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


@contextlib.contextmanager
def recorded_machine(root: Path) -> Iterator[None]:
    """Lets `kt doctor` see a machine of trees.py without AMX, and few models."""
    from ktcli.commands import doctor
    from ktcli.hardware.amx import Facts
    from ktcli.hardware.diagnosis import explain_rows
    from ktcli.hardware.probe import probe

    runs = (("avx512", False, "avx512f"), ("avx2", True, ""), ("portable", True, ""))
    rows = explain_rows(runs, None)
    no_tiles = Facts(lacking="amx_tile", used_row="avx2", model="Example CPU")
    with (
        patch.multiple(doctor, probe=partial(probe, root), SYSTEM_ROOT=root),
        patch.multiple(
            doctor, _kernels=lambda: (rows, ""), amx_facts=lambda machine, used: no_tiles
        ),
        few_models(),
    ):
        yield


def few_models() -> contextlib.AbstractContextManager[object]:
    """Shortens the catalogue: the rest would only make tables longer."""
    from ktcli.store import catalog

    return patch.object(catalog, "names", lambda: MODELS)


@contextlib.contextmanager
def few_models_on_a_disk() -> Iterator[None]:
    """Lets a disk have 100 GiB free, too."""
    from ktcli import smallfiles

    with few_models(), patch.object(smallfiles, "free_bytes", lambda folder: 100 << 30):
        yield


def helps() -> Iterator[Case]:
    """The help of every command."""
    for name in COMMANDS:
        verbs = getattr(load(name), "commands", {})
        for words in (name, *(f"{name} {verb}" for verb in verbs)):
            yield Case(f"help/{words.replace(' ', '-')}", (f"kt {words} --help",), tuple(LOOKS)[:3])
    yield Case("help/kt", ("kt --help",), tuple(LOOKS)[:3])


def printed(folder: Path) -> Iterator[Case]:
    """What needs no more than a library with conversions of kt-mini."""
    yield from helps()
    yield Case("list", ("kt list", "kt list --all", "kt du"), stands_in=few_models_on_a_disk)
    yield Case("search", ("kt search granite", "kt search kimmi"), TWO_LOOKS, stands_in=few_models)
    lines = (
        "kt alias",
        "kt alias big kimi-k2",
        "kt alias usual big",
        "kt alias",
        "kt alias --rm big",
    )
    yield Case("alias", (*lines, "kt alias kt-mini kimi-k2", "kt alias --rm usual"), ONE_LOOK)
    json = (
        "kt list --json",
        "kt verify kt-mini --json",
        "kt show kimi-k2 --json",
        "kt chta --json",
    )
    yield Case("json", json, IN_A_PIPE, stands_in=few_models_on_a_disk)
    yield Case(
        "show",
        ("kt show kt-mini", "kt show kimi-k2", "kt show kt-mini --experts"),
    )
    yield Case("verify", ("kt verify kt-mini",), measured=True)
    yield Case("plan-all", ("kt plan --machine laptop-16gb",), TWO_LOOKS, stands_in=few_models)
    yield Case(
        "plan",
        (
            "kt plan kimi-k2 --machine laptop-16gb",
            "kt plan gpt-oss-120b --machine workstation-4090-512gb",
        ),
        (*TWO_LOOKS, "TERM=dumb NO_COLOR=1 LC_ALL=C"),
        stands_in=few_models,
    )
    yield Case(
        "doctor",
        ("kt doctor", "kt doctor -v"),
        stands_in=partial(recorded_machine, build(TREES["desktop"], folder / "desktop")),
    )
    yield Case(
        "config",
        (
            "kt config list",
            "kt config get threads",
            "kt config set threads 0",
            "kt config set nothing 1",
            "kt config set temperature 0.5",
            "kt config get temperature",
            "kt config unset temperature",
            "kt config path",
        ),
    )
    yield Case("names", ("kt names",), ONE_LOOK, stands_in=few_models)
    yield Case("nothing-kept", ("kt chats", "kt chats show last", "kt cache du", "kt cache ls"))
    yield Case(
        "mistakes",
        (
            "kt chta",
            "kt run qwen3-30b-a3b",
            "kt chat hello",
            "kt chat kt-mini hi --temperature hot",
            "kt show nobody/nothing@",
            "kt plan kimi-k2 --machine nowhere",
            "kt verify nothing",
            "kt rm nothing",
            "kt config get nothing",
            "kt convert kt-mini --experts int3",
            "kt doctor --nothing",
        ),
    )


def measured() -> Iterator[Case]:
    """What computes; the library is empty at first."""
    case = partial(Case, measured=True, forks=True)
    yield case(
        "convert",
        ("kt convert kt-mini", "kt convert kt-mini", "kt convert kt-mini --experts int8"),
        ONE_LOOK,
    )
    yield case("convert-json", ("kt convert kt-mini --experts bf16 --json",), IN_A_PIPE)
    yield case(
        "chat",
        (
            'kt chat "what is int4?"',
            'kt chat "what is int4?" -n 5',
            'echo "what is MoE?" | kt chat --stats',
            "kt chat kt-mini hi --context 1000000",
        ),
        ONE_LOOK,
    )
    yield case(
        "chat-json",
        ('kt chat kt-mini "what is NUMA?" --json', 'kt chat kt-mini "hi" --jsonl'),
        IN_A_PIPE,
    )
    yield case("experts", ("kt show kt-mini --experts",))
    yield case(
        "eval",
        ("kt eval kt-mini --tokens 300 --formats int4,int8",),
        TWO_LOOKS,
    )
    yield case(
        "bench",
        ("kt bench decode kt-mini --runs 1 -n 4", "kt bench prefill kt-mini --runs 1"),
        ONE_LOOK,
    )
    yield case("rm", ("kt rm kt-mini@int8-int8 --yes", "kt rm kt-mini@int8-int8 --yes"), ONE_LOOK)


# --- making them --------------------------------------------------------------------------------------


def environment(folder: Path, *, measured: bool = False) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "KT_HOME": str(folder / "home"),
        "KT_CACHE": "1G",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9",
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "TERM": "xterm-256color",
        **(same_rows() if measured else {}),
    }


def made(case: Case, folder: Path) -> str:
    """The text of a case."""
    parts: list[str] = []
    for line in case.lines:
        usual = ""
        for look in case.looks:
            columns, more = LOOKS[look]
            run = forked if case.forks else direct
            text = masked(
                marked(run(line, case, folder, None if look == "a pipe" else columns, more)),
                case.measured,
            )
            same = usual == text
            usual = usual or text
            parts.append(
                f"$ {line}    # {look}\n{'as with 80 columns' + chr(10) if same else text}"
            )
    return "\n".join(parts)


def forked(line: str, case: Case, folder: Path, columns: int | None, more: dict[str, str]) -> Shown:
    shell = Shell(
        folder,
        {
            **environment(folder, measured=case.measured),
            "KT_THREADS": "1",
            "KT_DRAFT": "off",
            **more,
        },
    )
    return shell.run(line, columns) if columns else shell.run(f"{line} | cat", LONG)


class Stream(io.StringIO):
    """What takes the place of both streams of a command."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


def direct(line: str, case: Case, folder: Path, columns: int | None, more: dict[str, str]) -> Shown:
    """Runs a command in this process; in a pipe what it says beside its results comes first."""
    from ktcli.main import main

    told = Stream(columns is not None)
    result = Stream(False) if columns is None else told
    size = {} if columns is None else {"COLUMNS": str(columns)}
    with (
        patch.dict(
            os.environ, {**environment(folder, measured=case.measured), **more, **size}, clear=True
        ),
        patch.multiple(sys, stdin=io.StringIO(), stdout=result, stderr=told),
        contextlib.chdir(folder),
        patch.object(resources, "PACKAGE", resources.PACKAGE),
        case.stands_in(),
    ):
        ship_to(folder / "kt")
        code = int(main(shlex.split(line)[1:]))
    if columns is None:
        return Shown((told.getvalue() + result.getvalue()).rstrip("\n"), Text(), code)
    return shown_text(told.getvalue(), columns, code)


def marked(shown: Shown) -> str:
    """The lines of a screen, those that the terminal broke marked, with the code they ended with."""
    lines = shown.text.split("\n")
    text = "".join(f"{line}{'⏎' if at in shown.broken else ''}\n" for at, line in enumerate(lines))
    return text + (f"(exit code {shown.code})\n" if shown.code else "")


GROUPS = ("printed", "measured")


def group_made(group: str) -> dict[str, str]:
    """The snapshots of a group by their names, made now."""
    folder = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp"))  # of one length everywhere
    try:
        (folder / "home").mkdir()
        if group == "measured":
            import_everything()
            return {case.name: made(case, folder) for case in measured()}
        with_packs = Case("", ())
        for formats in ("int4", "int8"):
            direct(f"kt convert kt-mini --experts {formats}", with_packs, folder, 80, {})
        return {case.name: made(case, folder) for case in printed(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kept(group: str) -> dict[str, Path]:
    """The files of a group by their names."""
    folder = KEPT / group
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.txt")
    }


def differences(group: str) -> str:
    """What is printed otherwise now than it is kept; "": nothing."""
    found, files = group_made(group), kept(group)
    parts: list[str] = []
    for name in sorted(files.keys() | found.keys()):
        before = files[name].read_text(encoding="utf-8") if name in files else ""
        parts += difflib.unified_diff(
            before.splitlines(),
            found.get(name, "").splitlines(),
            f"{name}.txt",
            "now",
            lineterm="",
            n=1,
        )
    return "\n".join(parts)


def renew(group: str) -> None:
    """Writes the files of a group anew."""
    shutil.rmtree(KEPT / group, ignore_errors=True)
    for name, text in group_made(group).items():
        path = KEPT / group / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--check"]:
        found = differences(arguments[1])
        print(found)
        return 1 if found else 0
    for group in arguments or GROUPS:
        renew(group)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
