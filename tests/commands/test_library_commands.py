"""`list`, `show`, `pull`, `verify`, `rm`, `doctor` as a user meets them: output, exit codes, bad input."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packs import pretend_pack
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import manifest, native, smallfiles
from ktcli.main import main
from ktcli.manifest import FileRecord, Manifest
from ktcli.store import heat, integrity, places
from ktcli.store.pagefolder import PageFolder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("KT_ISA", "KT_NUMA", "KT_THREADS", "KT_TILE_MIN", "KT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def add(name: str, *, complete: bool = True) -> Path:
    folder = places.checkpoint_path(name)
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_text("{}")
    if complete:
        digest = integrity.digest(folder / "config.json")
        files = tuple(FileRecord(file, 2, digest) for file in ("config.json", "model.safetensors"))
        record = Manifest(files, "hf", "org/repo", "a" * 40)
        (folder / manifest.CHECKPOINT).write_bytes(record.encode())
    return folder


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    """The one document that a command prints with --json."""
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


# --- list -------------------------------------------------------------------------------------


def test_list_of_an_empty_library(home: Path, capsys: Capture) -> None:
    assert main(["list"]) == 0
    assert "kt list --all" in capsys.readouterr().err
    found = document(["list"], capsys)
    assert found["home"] == str(home)
    assert all(model["source"] == "built in" for model in found["models"])


def test_a_library_folder_that_is_not_there_is_not_called_empty(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["list"]) == 0
    assert f"The library folder {home} does not exist yet" in capsys.readouterr().err
    home.mkdir()
    assert main(["list"]) == 0
    assert f"The library {home} is empty" in capsys.readouterr().err
    monkeypatch.setenv("KT_HOME", str(home / "disk" / "kt"))
    assert main(["list"]) == 2
    assert f"there is no folder {home / 'disk'}" in capsys.readouterr().err


def test_list_shows_what_is_there_and_what_is_not_whole(capsys: Capture) -> None:
    add("org--repo")
    add("kimi-k2", complete=False)
    assert main(["list", "--all"]) == 0
    text = capsys.readouterr().out
    assert "org/repo" in text
    assert f"hf:org/repo@{'a' * 12}" in text
    assert "interrupted; continue with: kt pull kimi-k2" in text
    assert "deepseek-v3" in text
    assert "0.6 billion" in text and "671 billion" in text
    models = {model["name"]: model for model in document(["list", "--all"], capsys)["models"]}
    assert models["org/repo"]["complete"]
    assert models["org/repo"]["source"] == f"hf:org/repo@{'a' * 40}"
    assert models["kimi-k2"]["problem"] == "interrupted"


def test_list_says_where_a_conversion_is_from_and_which_is_of_a_newer_kt(capsys: Capture) -> None:
    pretend_pack(places.pack_path("tiny", "int4", "int8"))
    newer = pretend_pack(places.pack_path("tiny", "int8", "int8")) / manifest.PACK
    newer.write_bytes(newer.read_bytes().replace(b'"kt_pack": 1', b'"kt_pack": 99'))
    assert main(["list"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["tiny@int4-int8"].endswith("  tiny")
    assert rows["tiny@int8-int8"].endswith("cannot be used; kt verify tiny@int8-int8 says why")
    error = document(["verify", "tiny@int8-int8"], capsys, 5)["error"]
    assert "is from a newer kt: it has pack version 99; this kt reads version 1" in error["message"]
    assert "damaged" not in error["message"] and error["hint"].startswith("update kt")


def test_a_hostile_folder_name_cannot_reach_the_terminal(capsys: Capture) -> None:
    add("evil\x1b[31mred")
    assert main(["list"]) == 0
    assert "\x1b" not in capsys.readouterr().out


# --- show -------------------------------------------------------------------------------------


def test_show(capsys: Capture) -> None:
    found = document(["show", "qwen3-30b-a3b"], capsys)
    assert found["architecture"]["experts"] == 128
    assert found["architecture"]["parameters"] == pytest.approx(30.5e9, rel=0.01)
    assert found["architecture"]["active_parameters"] == pytest.approx(3.3e9, rel=0.03)
    assert found["on_disk"] == []
    assert main(["show", "qwen3-30b-a3b"]) == 0


@pytest.mark.parametrize(
    ("name", "formats"),
    [("gpt-oss-20b", ["mxfp4-int8", "int8-int8", "bf16-bf16"]), ("qwen3-0.6b", ["int4-int8", "bf16-bf16"])],
)  # fmt: skip
def test_show_begins_with_the_usual_conversion(
    name: str, formats: list[str], capsys: Capture
) -> None:
    """And names none twice whose bytes are the same, as of a model without experts."""
    found = document(["show", name], capsys)["architecture"]
    assert list(found["pack_bytes"]) == formats


def test_show_of_an_unknown_architecture_says_so(capsys: Capture) -> None:
    folder = add("org--repo")
    (folder / "config.json").write_text('{"model_type": "nonsense"}')
    assert "nonsense" in document(["show", "org/repo"], capsys)["architecture"]["problem"]
    assert main(["show", "org/repo"]) == 0


def test_show_of_what_is_not_complete_names_the_command_that_goes_on(capsys: Capture) -> None:
    add("acme--md", complete=False)
    error = document(["show", "acme/md"], capsys, 3)["error"]
    assert "interrupted" in error["message"]
    assert error["hint"] == "continue with: kt pull acme/md"


# --- pull without a network -------------------------------------------------------------------


def test_pull_of_a_local_folder(tmp_path: Path, capsys: Capture) -> None:
    """It is looked at as a conversion will: a folder that cannot be used is no good answer."""
    folder = random_checkpoint(tmp_path / "model", QWEN3)
    found = document(["pull", str(folder)], capsys)
    assert (found["path"], found["downloaded"]) == (str(folder), False)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"qwen3_moe"', '"qwen3_mooe"'))
    error = document(["pull", str(folder)], capsys, code=5)["error"]
    assert "unknown architecture" in error["message"]


def test_pull_of_what_is_there(capsys: Capture) -> None:
    add("org--repo")
    assert main(["pull", "org/repo"]) == 0
    assert "is already in the library" in capsys.readouterr().out


# --- verify -----------------------------------------------------------------------------------


def test_verify(capsys: Capture) -> None:
    folder = add("org--repo")
    assert document(["verify", "org/repo"], capsys)["ok"]
    (folder / "model.safetensors").write_text("[]")
    (folder / "config.json").unlink()
    found = document(["verify", "org/repo"], capsys, code=5)
    assert found["models"][0]["bad"] == {
        "config.json": "is missing",
        "model.safetensors": "has a checksum mismatch",
    }
    assert main(["verify", "org--repo"]) == 5
    assert "repair it with: kt verify org/repo --repair\n" in capsys.readouterr().out


def test_verify_looks_at_the_manifest_of_a_pack_too(capsys: Capture) -> None:
    path = pretend_pack(places.pack_path("tiny", "int4", "int8")) / manifest.PACK
    assert document(["verify", "tiny@int4-int8"], capsys)["models"][0]["manifest"] == "intact"
    written = path.read_bytes()
    path.write_bytes(written.replace(b"int4", b"int8", 1))
    bad = document(["verify", "tiny@int4-int8"], capsys, code=5)["models"][0]["bad"]
    assert bad == {"kt.json": "has a checksum mismatch"}
    old = json.loads(written)
    del old["sha256"]  # as an earlier kt wrote it
    path.write_text(json.dumps(old))
    assert main(["verify", "tiny@int4-int8"]) == 0
    assert "has no checksum of its own" in capsys.readouterr().out


def test_the_built_in_model_and_its_conversion(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = tmp_path / "built-in"
    builtin.mkdir()
    (builtin / "config.json").write_text("{}")
    monkeypatch.setattr(
        "ktcli.store.catalog.builtin_path",
        lambda name: builtin.parent / name.replace("kt-mini", "built-in"),
    )
    assert not document(["pull", "kt-mini"], capsys)["downloaded"]
    assert (
        "no hashes are recorded"
        in document(["verify", "kt-mini"], capsys, code=3)["error"]["message"]
    )
    assert document(["rm", "kt-mini", "--yes"], capsys, code=2)["error"]["type"] == "UsageError"
    pretend_pack(places.pack_path("kt-mini", "int4", "int8"))
    names = [model["name"] for model in document(["list"], capsys)["models"]]
    assert names == ["kt-mini", "kt-mini@int4-int8"]
    assert document(["verify", "kt-mini"], capsys)["ok"]
    assert document(["rm", "kt-mini", "--yes"], capsys)["removed"] == ["kt-mini@int4-int8"]
    assert (builtin / "config.json").exists()


# --- rm ---------------------------------------------------------------------------------------


def test_rm_frees_and_reports(capsys: Capture) -> None:
    folder = add("org--repo")
    found = document(["rm", "org/repo", "--yes"], capsys)
    assert found["removed"] == ["org/repo"]
    assert found["freed_bytes"] > 4
    assert not folder.exists()


def test_rm_of_partial_work(capsys: Capture) -> None:
    add("org--repo")
    add("kimi-k2", complete=False)
    assert document(["rm", "--partial", "--yes"], capsys)["removed"] == ["kimi-k2"]
    assert document(["rm", "--partial", "--yes"], capsys)["removed"] == []


def test_rm_leaves_what_was_completed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder = add("kimi-k2", complete=False)
    lock = smallfiles.lock

    def completed(*arguments: Any, **named: Any) -> Any:
        (folder / manifest.CHECKPOINT).write_bytes(Manifest(()).encode())
        return lock(*arguments, **named)

    monkeypatch.setattr(smallfiles, "lock", completed)
    assert document(["rm", "--partial", "--yes"], capsys)["removed"] == []
    assert folder.is_dir()


def test_rm_does_not_remove_what_is_not_ours(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert document(["rm", str(tmp_path), "--yes"], capsys, code=2)["error"]["type"] == "UsageError"
    assert (tmp_path / "config.json").exists()


def test_rm_without_a_terminal_needs_yes(capsys: Capture) -> None:
    folder = add("org--repo")
    assert "--yes" in document(["rm", "org/repo"], capsys, code=2)["error"]["hint"]
    assert folder.exists()


@pytest.mark.parametrize(
    ("answer", "code", "there"), [("y", 0, False), ("n", 1, True), ("", 1, True)]
)
def test_rm_asks_on_a_terminal(answer: str, code: int, there: bool) -> None:
    folder = add("org--repo")
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ktcli", "rm", "org/repo"], stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    os.write(outer, f"{answer}\n".encode())
    assert process.wait(timeout=60) == code
    said = b""
    with contextlib.suppress(OSError):  # the end: nobody has the terminal open any more
        while more := os.read(outer, 4096):
            said += more
    os.close(outer)
    assert b"Remove org/repo (checkpoint) and free" in said
    assert folder.exists() == there


# --- doctor -----------------------------------------------------------------------------------


def test_doctor(home: Path, capsys: Capture) -> None:
    code = main(["doctor", "-v"])
    text = capsys.readouterr().out
    assert code in (0, 1)
    assert "USED" in text
    found = document(["doctor"], capsys, code)
    assert found["exit_code"] == code
    assert found["home"] == str(home)
    assert sum(kernel["used"] for kernel in found["kernels"]) == 1
    assert found["machine"]["cpu"]["physical_cores"] >= 1


def test_a_library_folder_that_is_a_link_to_nowhere(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, nowhere = home.parent / "loop", home.parent / "nowhere"
    loop.symlink_to(loop)
    nowhere.symlink_to(home.parent / "gone")
    for link in (loop, nowhere):
        monkeypatch.setenv("KT_HOME", str(link))
        found = document(["doctor"], capsys, 2)
        assert f"KT_HOME is {link}, a broken link" in json.dumps(found["problems"])
        for line in (["list"], ["chat", "kt-mini", "hi"], ["cache", "du"]):
            assert "a broken link" in document(line, capsys, 2)["error"]["message"]


def test_doctor_on_a_library_that_cannot_be_written(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is converted there runs."""
    home.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = document(["doctor"], capsys, 1)
    levels = {problem["message"]: problem["level"] for problem in found["problems"]}
    assert (
        levels[f"the library folder {home} cannot be written: nothing can be added to it"]
        == "warning"
    )


@pytest.mark.usefixtures("briefly")
def test_doctor_measures_and_remembers(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = main(["doctor", "--measure", "--json"])
    rates = json.loads(capsys.readouterr().out)["machine"]["measured"]
    assert all(rates[name] > 0 for name in ("read_bps", "int8_ops", "bf16_ops"))
    assert document(["doctor"], capsys, code)["machine"]["measured"] == rates
    # Another row has not been measured.
    monkeypatch.setenv("KT_ISA", "portable")
    assert document(["doctor"], capsys, code)["machine"]["measured"] is None


CHECKS = ("cpuid", "os", "permission")


def test_doctor_says_why_tiles_are_or_are_not_used(home: Path, capsys: Capture) -> None:
    """All of it for scripts; for people only where the CPU could have them."""
    from ktcli.hardware.amx import explain
    from ktcli.hardware.probe import amx_facts, probe

    code = main(["doctor", "-v"])
    text = capsys.readouterr().out
    amx = document(["doctor"], capsys, code)["amx"]
    assert {*amx} == {*CHECKS, "used", "reason", "tile_min", "tile_min_from"}
    assert all({*amx[name]} == {"ok", "detail"} for name in CHECKS)
    used = next(each.name for each in native.isa_rows() if each.usable)
    said = [f"AMX      {'used' if amx['used'] else 'not used'}: {amx['reason']}"]
    said += [amx[name]["detail"] for name in CHECKS]
    possible = explain(amx_facts(probe(gpus=False), used)).possible
    assert [words in text for words in said] == [possible] * len(said)


@pytest.fixture
def xeon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to run tiles."""
    from ktcli import native
    from ktcli.measure import tiles
    from ktcli.native import library

    info = library.AmxInfo(True, True, True, True, True, 0, emulated=False)
    rows = (library.IsaRow("amx", True, ""), library.IsaRow("portable", True, ""))
    monkeypatch.setattr(native, "isa_rows", lambda: rows)
    monkeypatch.setattr(native, "amx_info", lambda: info)
    monkeypatch.setattr(tiles, "measure", lambda *_: tiles.TileMin(4, 6, 3))


def test_doctor_shows_where_tiles_begin(
    home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, xeon: None
) -> None:
    from ktcli.hardware.machine import Measured
    from ktcli.measure import rates

    found = Measured("amx", 1, 1e11, 1e13, 1e13, "2026-01-01")
    monkeypatch.setattr(rates, "measure", lambda *_: found)
    code = main(["doctor", "-v"])
    assert "loading the first model measures it" in capsys.readouterr().out
    assert main(["doctor", "-v", "--measure"]) == code
    said = capsys.readouterr()
    assert "from 4 (int4), 6 (int8), 3 (bf16) tokens per expert, measured" in said.out
    assert "tiles compared with vectors" in said.err
    amx = document(["doctor"], capsys, code)["amx"]
    assert amx["tile_min"] == {"int4": 4, "int8": 6, "bf16": 3}
    assert amx["tile_min_from"] == "measured"
    assert all(amx[name]["ok"] for name in CHECKS)
    monkeypatch.setenv("KT_ISA", "amx")
    main(["doctor", "-v"])
    assert "from 2 tokens per expert, not measured under KT_ISA" in capsys.readouterr().out
    monkeypatch.setenv("KT_TILE_MIN", "9")
    main(["doctor", "-v"])
    assert "from 9 tokens per expert, set by KT_TILE_MIN" in capsys.readouterr().out


def test_doctor_shows_the_teams(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_NUMA", "2")
    code = main(["doctor", "-v"])
    assert "in 2 teams (KT_NUMA=2)" in capsys.readouterr().out
    found = document(["doctor"], capsys, code)
    assert (found["numa"], len(found["teams"])) == ("2", 2)
    assert sum(team["threads"] for team in found["teams"]) == found["threads"]


def test_doctor_begins_with_its_verdict_and_is_short(capsys: Capture) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    found = document(["doctor"], capsys, code)
    assert lines[0] == {0: "Good: this machine can run kt.", 1: "Usable, with warnings."}[code]
    warnings = [each for each in found["problems"] if each["level"] == "warning"]
    assert len(lines) <= 10 + 2 * len(warnings) + len(found["machine"]["gpus"])
    assert lines[-1].startswith("kt doctor -v shows ")
    assert 1 <= len(found["models"]) <= 3 and all(each["fits"] for each in found["models"])
    shown = next(line for line in lines if line.startswith("Runs"))
    assert all(each["name"] in shown for each in found["models"])


def test_doctor_records_a_machine_to_plan_for(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "mine.json"
    code = main(["doctor", "--record", str(path)])
    assert code in (0, 1)
    assert f"kt plan --machine {path}" in capsys.readouterr().err
    assert str(tmp_path) not in path.read_text()
    plan = document(["plan", "kt-mini", "--machine", str(path)], capsys, 0)
    assert plan["fits"] and plan["machine"]["threads"] >= 1


def test_doctor_reports_without_names(
    home: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "ada.lovelace")
    monkeypatch.setenv("LOGNAME", "ada.lovelace")
    monkeypatch.setenv("HOME", "/home/ada.lovelace")
    monkeypatch.setenv("HF_TOKEN", "a-very-secret-word")
    for name in ("platform.node", "socket.gethostname"):
        monkeypatch.setattr(name, lambda: "quuxwald")
    monkeypatch.setenv(
        "KT_ISA", "a-very-secret-word of ada.lovelace at quuxwald in /home/ada.lovelace/x"
    )
    path = tmp_path / "report.json"
    main(["doctor", "--report", str(path)])
    text = path.read_text()
    for word in ("ada.lovelace", "secret-word", str(home), "quuxwald"):
        assert word not in text
    found = json.loads(text)
    assert found["home"] == "KT_HOME" and found["machine"]["cpu"]["physical_cores"] >= 1
    assert found["problems"][0]["level"] == "error" and found["version"]


@pytest.mark.parametrize("option", ["--record", "--report"])
def test_a_file_that_cannot_be_written_is_told_at_once(option: str, capsys: Capture) -> None:
    assert main(["doctor", option, "/nowhere/x.json"]) == 2
    assert f"{option}: the file /nowhere/x.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', "\0", "[" * 100_000])
def test_a_damaged_measurement_counts_as_none(text: str, home: Path, capsys: Capture) -> None:
    home.mkdir()
    (home / "measured.json").write_text(text)
    assert main(["doctor"]) in (0, 1)
    assert "not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KT_ISA", "nonsense"),
        ("KT_THREADS", "many"),
        ("KT_THREADS", "-1"),
        ("KT_THREADS", "0"),
        ("KT_TILE_MIN", "4097"),
        ("KT_THREADS", "4096"),
        ("KT_NUMA", "some"),
        ("KT_NUMA", "nodes=4095"),
    ],
)
def test_doctor_explains_a_wrong_environment(
    name: str, value: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = document(["doctor"], capsys, code=2)
    assert found["problems"][0]["level"] == "error"
    assert found["problems"][0]["fix"] == f"unset {name}"


# --- nothing a user does ends in a traceback --------------------------------------------------

READERS = [
    ["list"],
    ["list", "--all"],
    ["names"],
    ["show", "org/repo"],
    ["verify", "org/repo"],
    ["pull", "org/repo"],
]
DAMAGE = [
    "home is a file",
    "checkpoints is a file",
    "manifest is broken",
    "manifest is a folder",
    "loop of links",
]


def damage(kind: str, home: Path) -> None:
    if kind == "home is a file":
        home.write_text("")
        return
    home.mkdir()
    if kind == "checkpoints is a file":
        (home / "checkpoints").write_text("")
        return
    folder = add("org--repo")
    record = folder / manifest.CHECKPOINT
    if kind == "manifest is broken":
        record.write_text('{"source": 1')
    elif kind == "manifest is a folder":
        record.unlink()
        record.mkdir()
    else:
        (folder / "loop").symlink_to(folder)


@pytest.mark.each_once
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize(
    "arguments", [*READERS, ["rm", "org/repo", "--yes"], ["doctor"]], ids=" ".join
)
def test_a_damaged_library_is_said_in_a_sentence(
    arguments: list[str], kind: str, home: Path, capsys: Capture
) -> None:
    damage(kind, home)
    code = main(arguments)
    said = capsys.readouterr()
    assert code != 70, said.err
    assert "Traceback" not in said.err
    if code and arguments != ["doctor"] and arguments[0] != "verify":
        assert said.err.count("error:") == 1


BAD = [
    "",
    "..",
    "a b",
    "../../etc/passwd",
    "/etc/passwd",
    "org/../x",
    "hf:",
    "nope",
    "\udcff",
    "x" * 5000,
    "-",
]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["show", "pull", "verify", "rm", "plan", "chat", "convert"])
def test_a_bad_name_is_a_sentence(command: str, name: str, capsys: Capture) -> None:
    arguments = [command, *(["--yes"] if command == "rm" else []), "--", name]
    if command == "chat":
        arguments.append("hello")
    code = main(arguments)
    said = capsys.readouterr()
    assert code in (2, 3), said.err
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err


def test_rm_frees_a_full_disk(home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no byte there: not for its lock, nor for those of heat maps and KV pages."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder, heat_map, pages = add("tiny"), heat.path_of("tiny"), PageFolder.of_library()
    for each in (heat_map.parent, pages.path):
        each.mkdir()
    heat_map.write_text("{}")
    for call in ("write", "pwrite"):
        monkeypatch.setattr(os, call, full)
    assert main(["rm", "-y", "tiny"]) == 0
    assert "Removed tiny" in capsys.readouterr().out
    assert not folder.exists() and not heat_map.exists()
    assert pages.remove() == 0
