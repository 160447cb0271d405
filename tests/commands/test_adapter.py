"""`kt adapter` as a user meets it: whole or not there, its base found and compared, one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapters.fake_adapter import FUSED, fused, linear, q_proj, write
from store.fake_hub import Hub, serve
from weights.fake_checkpoint import FP8, QWEN3, random_checkpoint, sources, write_checkpoint

from ktcli import manifest
from ktcli.adapters.folder import open_adapter
from ktcli.assembly.adapters import BaseModel, compare_base, digest_of
from ktcli.errors import ExitCode
from ktcli.main import main
from ktcli.models import build
from ktcli.store import adapters, removal

Capture = pytest.CaptureFixture[str]
BOTH = {"target_modules": ["q_proj"], "target_parameters": FUSED["target_parameters"]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model folder with its config only: no weights are needed."""
    folder = random_checkpoint(tmp_path / "models" / "base", QWEN3)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    arrays = q_proj() | fused()
    return write(tmp_path / "poet", arrays, **BOTH, base_model_name_or_path=str(base))


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    """The one document that a command prints with --json."""
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


def failed(arguments: list[str], capsys: Capture, code: int) -> dict[str, Any]:
    error = document(arguments, capsys, code)["error"]
    assert "\n" not in error["message"]
    return error


# --- import, list, show, rm -----------------------------------------------------------------------


def test_an_adapter_comes_and_goes(folder: Path, home: Path, base: Path, capsys: Capture) -> None:
    (folder / "README.md").write_text(
        '---\nbase_model: x\ndatasets:\n- poems\n- "limericks"\n---\n# Card\n'
    )
    (folder / "optimizer.pt").write_bytes(b"\x80\x04.")
    found = document(["adapter", "import", str(folder)], capsys)
    assert found["adapter"] == "poet" and found["base"] == str(base)
    assert found["trained_on"] == ["poems", "limericks"]
    names = {path.name for path in (home / "adapters" / "poet").iterdir()}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "kt-adapter.json",
    }
    (row,) = document(["adapter", "list"], capsys)["adapters"]
    assert row["name"] == "poet" and row["base"] == str(base) and row["problem"] is None
    shown = document(["adapter", "show", "poet"], capsys)
    assert shown == found | {"path": str(home / "adapters" / "poet")}
    assert document(["adapter", "verify"], capsys)["ok"]
    with open_adapter(folder, build(QWEN3)) as adapter:
        assert digest_of(adapters.resolve("poet")) == adapter.digest
    gone = document(["adapter", "rm", "POET", "--yes"], capsys)
    assert gone["removed"] == ["poet"] and gone["freed_bytes"] > row["size_bytes"]
    assert document(["adapter", "list"], capsys) == {"adapters": []}
    assert list((home / "adapters").iterdir()) == []


def test_what_is_shown(folder: Path, base: Path, capsys: Capture) -> None:
    found = document(["adapter", "show", str(folder)], capsys)
    assert found["adapter"] is None and found["path"] == str(folder)
    attention, experts = (
        found["parts"] if found["parts"][0]["part"] == "attention" else found["parts"][::-1]
    )
    assert (
        attention["targets"] == ["q_proj"]
        and attention["ranks"] == [4]
        and attention["scales"] == [1.5]
    )
    arrays = q_proj()
    a, b = (values.astype(float) for values in arrays.values())
    assert attention["norm"] == pytest.approx(1.5 * float(np.linalg.norm(b @ a)), rel=1e-9)
    assert experts["part"] == "routed experts" and experts["modules"] == 2
    assert main(["adapter", "show", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "routed experts" in text and "gate_up_proj, down_proj" in text and "PART" in text


def test_norms_of_nothing_are_zero(tmp_path: Path, base: Path, capsys: Capture) -> None:
    arrays = {name: 0 * values for name, values in q_proj().items()}
    folder = write(tmp_path / "untrained", arrays)
    (part,) = document(["adapter", "show", str(folder), "--base", str(base)], capsys)["parts"]
    assert part["norm"] == 0.0


def test_llama_factory_says_what_it_was_trained_on(folder: Path, capsys: Capture) -> None:
    (folder / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n\nThis model is a fine-tuned version of [a/b](https://hf.co/a/b) on the identity"
        " and the alpaca_en_demo datasets.\n"
    )
    assert document(["adapter", "show", str(folder)], capsys)["trained_on"] == [
        "identity",
        "alpaca_en_demo",
    ]


def test_names(folder: Path, capsys: Capture) -> None:
    for name in ("../x", "a/b", "..", ".hidden", "a b", "a+b", "x" * 97, ""):
        error = failed(["adapter", "import", str(folder), "--as", name], capsys, ExitCode.USAGE)
        assert "cannot be the name of an adapter" in error["message"]
    assert adapters.every() == ()
    document(["adapter", "import", str(folder)], capsys)
    error = failed(["adapter", "import", str(folder), "--as", "Poet"], capsys, ExitCode.USAGE)
    assert "already in the library" in error["message"] and "kt adapter rm poet" in error["hint"]
    document(["adapter", "import", str(folder), "--as", "other"], capsys)
    error = failed(["adapter", "show", "pet"], capsys, ExitCode.NOT_FOUND)
    assert "poet" in error["hint"]


def test_a_trainers_checkpoint_has_the_name_of_its_folder(
    tmp_path: Path, base: Path, capsys: Capture
) -> None:
    folder = write(tmp_path / "sft" / "checkpoint-300", q_proj())
    found = document(["adapter", "import", str(folder), "--base", str(base)], capsys)
    assert found["adapter"] == "sft"


# --- the base -------------------------------------------------------------------------------------


def test_a_base_of_the_catalogue_needs_nothing_on_disk(tmp_path: Path, capsys: Capture) -> None:
    arrays = linear("47.self_attn.q_proj", 4096, 2048)
    for at, said in enumerate(("Qwen/Qwen3-30B-A3B", "/root/models/Qwen3-30B-A3B",
                               "/root/hub/models--Qwen--Qwen3-30B-A3B/snapshots/0123")):  # fmt: skip
        folder = write(tmp_path / str(at), arrays, base_model_name_or_path=said)
        assert main(["adapter", "show", str(folder), "--json"]) == 0
        told = capsys.readouterr()
        assert json.loads(told.out)["base"] == "qwen3-30b-a3b"
        assert ("which has that name" in told.err) == (at > 0)
        assert main(["adapter", "show", str(folder), "--base", "qwen3-30b-a3b", "--json"]) == 0
        assert "as the base" not in capsys.readouterr().err


def test_a_base_that_is_not_here(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    for said, words in (
        ("org/unheard-of", "is not on disk and not in the catalogue"),
        ("/nonexistent/../../etc", "is not on disk and not in the catalogue"),
        ("~nobody-of-this-name/x", "is not on disk and not in the catalogue"),
    ):
        write(folder, q_proj(), base_model_name_or_path=said)
        error = failed(["adapter", "import", str(folder)], capsys, ExitCode.NOT_FOUND)
        assert words in error["message"] and "--base MODEL" in error["hint"]
    write(folder, q_proj(), base_model_name_or_path=None)
    error = failed(["adapter", "import", str(folder)], capsys, ExitCode.USAGE)
    assert "does not name a base model" in error["message"]
    error = failed(
        ["adapter", "import", str(folder), "--base", "qwen3-30b-a3"], capsys, ExitCode.NOT_FOUND
    )
    assert "qwen3-30b-a3b" in error["hint"]


def test_a_base_in_another_folder_is_known_by_its_name(tmp_path: Path) -> None:
    """A GGUF file trained on in one folder, and chatted with by the name that the library gave it."""
    warned: list[str] = []
    listener: Any = SimpleNamespace(warn=warned.append)
    for said in ("/somewhere/else/tiny.Q4_1.gguf", "/somewhere/else/other.gguf"):
        compare_base(said, BaseModel("tiny.Q4_1.gguf", "tiny.Q4_1.gguf", build(QWEN3)), listener)
    assert len(warned) == 1 and "names /somewhere/else/other.gguf" in warned[0]


def test_another_base_of_the_same_shape_is_warned_of(
    folder: Path, base: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = random_checkpoint(tmp_path / "models" / "twin", QWEN3)
    assert main(["adapter", "import", str(folder), "--base", str(other)]) == 0
    told = capsys.readouterr().err
    assert f"names {base} as the base" in told and "only shapes are compared" in told
    assert main(["adapter", "import", str(folder), "--base", str(base), "--as", "b"]) == 0
    assert "as the base" not in capsys.readouterr().err


def test_another_base_of_another_shape_is_refused(
    folder: Path, home: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = random_checkpoint(tmp_path / "models" / "wide", QWEN3 | {"hidden_size": 96})
    error = failed(
        ["adapter", "import", str(folder), "--base", str(other)], capsys, ExitCode.DAMAGED
    )
    assert "[4, 80], but the base model requires [4, 96]" in error["message"]
    assert not (home / "adapters").exists()


# --- damage ---------------------------------------------------------------------------------------


def test_numbers_are_read_before_anything_is_kept(
    tmp_path: Path, base: Path, home: Path, capsys: Capture
) -> None:
    arrays = {name: values * np.float32(np.nan) for name, values in q_proj().items()}
    folder = write(tmp_path / "diverged", arrays)
    error = failed(
        ["adapter", "import", str(folder), "--base", str(base)], capsys, ExitCode.DAMAGED
    )
    assert "contains NaN or Inf" in error["message"]
    assert list((home / "adapters").iterdir()) == []


def test_a_changed_file_is_found(folder: Path, home: Path, capsys: Capture) -> None:
    document(["adapter", "import", str(folder)], capsys)
    path = home / "adapters" / "poet" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    found = document(["adapter", "verify", "poet"], capsys, ExitCode.DAMAGED)
    assert found["adapters"][0]["bad"] == {"adapter_model.safetensors": "has a checksum mismatch"}
    (home / "adapters" / "poet" / "kt-adapter.json").write_text("{}")
    (row,) = document(["adapter", "list"], capsys)["adapters"]
    assert "has version None" in row["problem"]
    assert not document(["adapter", "verify"], capsys, ExitCode.DAMAGED)["ok"]
    assert (
        "cannot be used" in failed(["adapter", "show", "poet"], capsys, ExitCode.DAMAGED)["message"]
    )
    document(["adapter", "rm", "poet", "--yes"], capsys)


def test_files_that_nobody_touched_are_not_hashed_again(
    folder: Path, base: Path, home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    document(["adapter", "import", str(folder), "--as", "poet"], capsys)
    entry = adapters.resolve("poet")
    hashes, weights = adapters.unchanged(entry), entry.path / "adapter_model.safetensors"
    assert hashes == {each.name: each.sha256 for each in entry.records}
    with monkeypatch.context() as patch, open_adapter(entry.path, build(QWEN3), hashes) as adapter:
        patch.setattr("ktcli.adapters.adapter.hash_of", None)
        assert adapter.digest == digest_of(entry)
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p does
    assert set(adapters.unchanged(entry)) == set(hashes) - {weights.name}
    with open_adapter(entry.path, build(QWEN3), adapters.unchanged(entry)) as adapter:
        assert adapter.digest != digest_of(entry)
    weights.unlink()
    assert weights.name not in adapters.unchanged(entry)


KILLED = """
import os, signal, sys
from ktcli.main import main
from ktcli.store import adapters

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(adapters, sys.argv[1], die)
main(["adapter", "import", sys.argv[2]])
"""


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("_copied", marks=pytest.mark.thorough),
        "complete",
        pytest.param("_document", marks=pytest.mark.thorough),
    ],
)
def test_kill_9_leaves_nothing_that_is_seen(
    folder: Path, home: Path, capsys: Capture, at: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, at, str(folder)], capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert document(["adapter", "list"], capsys) == {"adapters": []}
    (left,) = adapters.leftovers()
    assert left.name.startswith(".poet.importing.") and left in removal.leftovers()
    document(["adapter", "import", str(folder)], capsys)
    document(["prune", "--yes"], capsys)
    assert adapters.leftovers() == () and len(adapters.every()) == 1


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_nothing(
    folder: Path, home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "complete", stop)
    error = failed(["adapter", "import", str(folder)], capsys, ExitCode.INTERRUPTED)
    assert error["hint"] == "nothing was imported; run the same command again"
    assert list((home / "adapters").iterdir()) == []


def test_a_full_disk(
    folder: Path, home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktcli.smallfiles.free_bytes", lambda folder: 10)
    error = failed(["adapter", "import", str(folder)], capsys, ExitCode.NO_ROOM)
    assert "importing the adapter needs" in error["message"]
    assert list((home / "adapters").iterdir()) == []


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["peft", "per-expert", "kt-kernel"])
def test_an_export_is_read_again(
    folder: Path, tmp_path: Path, capsys: Capture, layout: str
) -> None:
    document(["adapter", "import", str(folder)], capsys)
    target = tmp_path / "out" / layout
    found = document(["adapter", "export", "poet", str(target), "--layout", layout], capsys)
    assert found["files"] == sorted(os.listdir(target))
    assert ("fused_expert_lora.safetensors" in found["files"]) == (layout == "kt-kernel")
    ours, theirs = (document(["adapter", "show", name], capsys) for name in ("poet", str(target)))
    for own, other in zip(ours["parts"], theirs["parts"], strict=True):
        assert own["part"] == other["part"]
        near = 1e-2 if layout == "kt-kernel" else 1e-12
        # Gate and up apart: the squares of their norms have the same sum.
        assert other["norm"] == pytest.approx(own["norm"], rel=near)
    assert [p.name for p in target.parent.iterdir()] == [layout]


def test_an_export_replaces_nothing(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    error = failed(["adapter", "export", str(folder), str(folder)], capsys, ExitCode.USAGE)
    assert "is not an empty folder" in error["message"]
    target = str(tmp_path / "new")
    error = failed(
        ["adapter", "export", str(folder), target, "--layout", "gguf"], capsys, ExitCode.USAGE
    )
    assert "unknown layout 'gguf'" in error["message"]
    assert not Path(target).exists()


def test_kt_kernel_has_one_rank(tmp_path: Path, base: Path, capsys: Capture) -> None:
    ranks = {"rank_pattern": {"experts.down_proj": 2}}
    arrays = fused(down=True)
    small = fused(r=2)
    arrays |= {name: small[name] for name in small if "base_layer" not in name}
    folder = write(tmp_path / "mixed", arrays, **FUSED, **ranks)
    said = ["adapter", "export", str(folder), str(tmp_path / "new"), "--base", str(base)]
    error = failed([*said, "--layout", "kt-kernel"], capsys, ExitCode.USAGE)
    assert (
        "one rank and scale alpha / r; the experts here have 2 (scale 3), 4 (scale 1.5)"
        in error["message"]
    )
    assert not (tmp_path / "new").exists() and len(list(tmp_path.iterdir())) == 2


# --- merging --------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base with weights."""
    monkeypatch.setattr("ktcli.commands.convert.require_known_tokenizer", lambda path: None)
    return random_checkpoint(base, QWEN3)


def test_a_merged_model_is_a_model_of_its_own(
    folder: Path, checkpoint: Path, home: Path, capsys: Capture
) -> None:
    document(["adapter", "import", str(folder)], capsys)
    plain = document(["convert", str(checkpoint), "--experts", "int8"], capsys)
    merged = document(
        ["convert", str(checkpoint), "--experts", "int8", "--adapter", "poet"], capsys
    )
    assert plain["adapter"] is None and merged["path"] == str(
        home / "packs" / "base-poet@int8-int8"
    )
    assert merged["talk"] == "kt chat base-poet@int8-int8"
    found = manifest.read(Path(merged["path"]) / "kt.json")
    assert found is not None and found.adapter == merged["adapter"] and found.digest
    ours, theirs = (
        {path.name: path.read_bytes() for path in Path(each["path"]).glob("*.safetensors")}
        for each in (merged, plain)
    )
    assert [name for name in ours if ours[name] != theirs[name]] == ["layer-00000.safetensors"]
    again = document(["convert", str(checkpoint), "--experts", "int8", "--adapter", str(folder),
                      "--as", "base-poet"], capsys)  # fmt: skip
    assert not again["already_complete"] or again["path"] == merged["path"]
    names = {row["name"] for row in document(["list"], capsys)["models"]}
    assert any("base-poet" in name for name in names)
    assert document(["verify", "base-poet@int8-int8"], capsys)["ok"]


def test_what_a_merged_model_refuses(
    folder: Path, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = str(tmp_path / "pack")
    said = ["convert", str(checkpoint), "--out", out, "--experts", "int8"]
    document([*said, "--adapter", str(folder)], capsys)
    error = failed(said, capsys, ExitCode.USAGE)
    assert "already holds this model merged with an adapter" in error["message"]
    write(tmp_path / "other", q_proj(1))
    error = failed([*said, "--adapter", str(tmp_path / "other")], capsys, ExitCode.USAGE)
    assert "merged with another adapter" in error["message"]
    error = failed(["convert", out, "--adapter", str(folder)], capsys, ExitCode.USAGE)
    assert "merging an adapter into packed codes loses most of a small update" in error["message"]
    error = failed(["convert", str(checkpoint), "--as", "x"], capsys, ExitCode.USAGE)
    assert "--as names a merged model" in error["message"]
    error = failed([*said, "--adapter", str(folder), "--as", "x"], capsys, ExitCode.USAGE)
    assert "exclude each other" in error["message"]
    named = ["convert", str(checkpoint), "--adapter", str(folder), "--as", "qwen3-8b"]
    assert "cannot be the name" in failed(named, capsys, ExitCode.USAGE)["message"]


def test_codes_are_not_rounded_to_themselves(
    folder: Path, base: Path, tmp_path: Path, capsys: Capture, checkpoint: Path
) -> None:
    """A checkpoint in FP8 with blocks of factors: as fp8 again the update would be lost, in bf16 it is kept."""
    coded = write_checkpoint(tmp_path / "models" / "fp8", QWEN3 | FP8, sources(QWEN3, "F8_E4M3"))
    said = ["convert", str(coded), "--adapter", str(folder), "--out", str(tmp_path / "pack")]
    error = failed([*said, "--experts", "fp8", "--dense", "bf16"], capsys, ExitCode.USAGE)
    assert "would be rounded to fp8 again, which loses most of a small update" in error["message"]
    document([*said, "--experts", "bf16", "--dense", "bf16"], capsys)


def test_a_damaged_merged_model_is_made_again(
    folder: Path, checkpoint: Path, home: Path, capsys: Capture
) -> None:
    """Not repaired: kt does not keep the adapter with it, and says so."""
    made = document(
        ["convert", str(checkpoint), "--experts", "int8", "--adapter", str(folder)], capsys
    )
    path = Path(made["path"]) / "layer-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    found = document(["verify", "base-poet"], capsys, ExitCode.DAMAGED)
    again = "kt convert MODEL@int8-int8 --adapter ADAPTER --as base-poet"
    assert found["models"][0]["repair"] == f"kt rm base-poet@int8-int8 && {again}"


# --- pulling --------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def published(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"README.md": b"---\ndatasets: poems\n---\n", "adapter.py": b"import os"}


def test_an_adapter_of_a_hub(
    folder: Path, hub: Hub, home: Path, base: Path, capsys: Capture
) -> None:
    hub.repositories["org/poet"] = published(folder)
    found = document(["pull", "org/poet"], capsys)
    assert found["adapter"] == "poet" and found["base"] == str(base)
    assert found["trained_on"] == ["poems"]
    assert [path.name for path in (home / "adapters").iterdir()] == ["poet"]
    assert not (home / "adapters" / "poet" / "adapter.py").exists()
    error = failed(["pull", "org/poet"], capsys, ExitCode.USAGE)
    assert "already in the library" in error["message"]
    assert document(["pull", "org/poet", "--as", "other"], capsys)["adapter"] == "other"


def test_a_pull_that_was_cut_off_goes_on(
    folder: Path, hub: Hub, home: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/poet"] = published(folder)
    monkeypatch.setattr("ktcli.assembly.pull_adapter.import_adapter", stop)
    error = failed(["pull", "org/poet"], capsys, ExitCode.INTERRUPTED)
    assert "continue with: kt pull org/poet" in error["hint"]
    assert adapters.every() == ()
    assert [path.name for path in adapters.leftovers()] == [".poet.pulling"]
    monkeypatch.undo()
    monkeypatch.setenv("KT_HOME", str(home))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert document(["pull", "org/poet"], capsys)["adapter"] == "poet"
    assert hub.fetched("adapter_model.safetensors") == 1 and adapters.leftovers() == ()


def test_adapters_of_a_hub_that_are_refused(
    folder: Path, hub: Hub, home: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Before the weights are fetched, where the config says so."""
    strange = write(tmp_path / "strange", q_proj(), base_model_name_or_path="org/unheard-of")
    dora = write(tmp_path / "dora", q_proj(), use_dora=True)
    for name, of, code, words in (
        (
            "strange",
            strange,
            ExitCode.NOT_FOUND,
            "org/unheard-of', which adapter_config.json names",
        ),
        ("dora", dora, ExitCode.DAMAGED, "kt does not read DoRA"),
    ):
        hub.repositories[f"org/{name}"] = published(of)
        error = failed(["pull", f"org/{name}"], capsys, code)
        assert words in error["message"] and hub.fetched("adapter_model.safetensors") == 0
    files = published(folder)
    files["adapter_model.bin"] = files.pop("adapter_model.safetensors")
    hub.repositories["org/pickled"] = files
    error = failed(["pull", "org/pickled"], capsys, ExitCode.DAMAGED)
    assert "has no adapter_model.safetensors" in error["message"]
    error = failed(["chat", "org/pickled", "hi"], capsys, ExitCode.DAMAGED)
    assert "is a LoRA adapter, not a model" in error["message"]
    assert adapters.every() == ()


def test_a_model_with_an_adapter_beside_it_is_a_model(
    folder: Path, hub: Hub, capsys: Capture
) -> None:
    files = published(folder) | {"config.json": b"{}", "model.safetensors": b"x"}
    hub.repositories["org/both"] = files
    error = failed(["pull", "org/both"], capsys, ExitCode.DAMAGED)
    assert "adapter" not in error["message"]
