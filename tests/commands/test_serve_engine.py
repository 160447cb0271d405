"""`kt serve --engine sglang-kt`: the line that is shown, what is refused, and a server from its start to `kt stop`."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from processes import is_gone
from server.sglanged import FakeSglang, install_fake
from waits import until

from ktcli.errors import BadCheckpoint, UsageError
from ktcli.hardware.profile import read_machine
from ktcli.main import main
from ktcli.server.sglang import preparing
from ktcli.server.sglang.families import changes_experts, code_of, require_code
from ktcli.store import catalog

ENGINE = ("--engine", "sglang-kt")
THERE = (*ENGINE, "--machine", "server-8xl20-1tb", "--dry-run")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def serve(*words: str) -> int:
    return main(["serve", *words])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the config of a model, and no weights."""
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(catalog.get("qwen3-30b-a3b").config)))
    return folder


def test_the_line_for_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("minimax-m2", *THERE, "--context", "16384", "--port", "9000") == 0
    text, err = capsys.readouterr()
    words = shlex.split(text.splitlines()[0])
    assert words[:4] == ["CUDA_VISIBLE_DEVICES=0,1,2,3", "python", "-m", "sglang.launch_server"]
    assert words[words.index("--context-length") + 1] == "16384"
    assert words[words.index("--port") + 1] == "9000"
    assert "4 of 8 GPUs are used" in text and not err
    assert serve("minimax-m2", *THERE, "--context", "16384", "--port", "9000", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [f"{key}={value}" for key, value in document["environment"].items()] == words[:1]
    assert document["command"] == words[1:]
    whys = {each["flag"]: each["why"] for each in document["options"]}
    assert "physical cores" in whys["--kt-cpuinfer"]


def test_keys_are_read_and_hidden(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = secrets.token_urlsafe
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: f"-{made(size)}")  # one of 64 is so
    file = tmp_path / "keys"
    file.write_text("SECRET")
    file.chmod(0o600)
    words = ("minimax-m2", *THERE, "--host", "0.0.0.0")
    assert serve(*words) == 2
    assert "reachable from other machines and needs an API key" in capsys.readouterr().err
    assert serve(*words, "--api-key-file", str(file)) == 0
    text = capsys.readouterr().out
    assert "--api-key '***'" in text.replace("--api-key ***", "--api-key '***'")
    assert "--admin-api-key" in text and "SECRET" not in text
    file.write_text("a: SECRET\nb: OTHER\n")
    assert serve(*words, "--api-key-file", str(file)) == 2
    assert "takes one API key, and the file has 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("minimax-m2", "--engine", "vllm"), "--engine 'vllm' is unknown"),
        (("minimax-m2", "--dry-run"), "--dry-run needs --engine sglang-kt"),
        (("minimax-m2", "--method", "FP8"), "--method needs --engine sglang-kt"),
        (("minimax-m2", "--json"), "--json needs --engine sglang-kt"),
        (("minimax-m2", *ENGINE, "--json"), "--json needs --dry-run"),
        (("minimax-m2", *ENGINE, "--machine", "laptop-16gb"), "--machine needs --dry-run"),
        (("minimax-m2", *ENGINE, "--ollama"), "--ollama has no meaning with --engine"),
        (("minimax-m2", *ENGINE, "--kv", "fp8"), "--kv has no meaning with --engine"),
        (("minimax-m2", *THERE, "--device", "cpu"), "--device cpu has no meaning with --engine"),
        (("minimax-m2", *THERE, "--background"), "cannot be used together"),
        (("minimax-m2", *THERE, "--gpu-experts", "hot"), "is not a number of experts"),
        (
            ("minimax-m2", *THERE, "--expert-weights", "/x"),
            "--expert-weights needs --method AMXINT4",
        ),
        (("minimax-m2", *THERE, "--kv-store", "/pages"), "is not the address of a Mooncake store"),
        (("kimi-k2", *THERE), "only with code of its repository"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(*words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("error: ") == 1


def test_machines_and_models_without_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("minimax-m2", *ENGINE) == 3
    assert "install it with: kt engine install sglang-kt" in capsys.readouterr().err
    assert serve("minimax-m2", *ENGINE, "--machine", "laptop-16gb", "--dry-run") == 10
    assert "needs an NVIDIA GPU, and laptop, 16 GB has none" in capsys.readouterr().err
    assert serve("deepseek-v3", *ENGINE, "--machine", "workstation-2x4090", "--dry-run") == 4
    assert "only" in capsys.readouterr().err
    assert serve("minimax-m2", *THERE, "--print-unit") == 2
    capsys.readouterr()
    assert serve("minimax-m2", *ENGINE, "--print-unit", "--context", "4096") == 0
    unit = capsys.readouterr().out
    assert "--engine=sglang-kt --context=4096 -- minimax-m2" in unit


def test_a_store_is_on_a_private_network_or_it_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """As for kt's own engine; the line for another machine is shown without looking."""
    there = read_machine(Path("cloud-h200-128gb"))
    monkeypatch.setattr(preparing, "machine_here", lambda: there)
    install_fake()
    words = (str(checkpoint), *ENGINE, "--kv-store", "mooncake://8.8.8.8:1")
    assert serve(*words) == 1
    assert "8.8.8.8 is not an address of a private network" in capsys.readouterr().err
    missing = ("--method", "AMXINT4", "--expert-weights", str(checkpoint / "none"))
    assert serve(*words, "--insecure", *missing) == 3
    assert "none is not a folder" in capsys.readouterr().err
    assert serve(*words, "--dry-run") == 0
    assert "8.8.8.8:1" in capsys.readouterr().out
    assert serve(*words[:-1], "off", "--dry-run") == 0
    assert "hicache" not in capsys.readouterr().out


def test_an_engine_with_other_flags_or_without_the_checkpoint_is_not_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    there = read_machine(Path("cloud-h200-128gb"))
    monkeypatch.setattr(preparing, "machine_here", lambda: there)
    fake = install_fake()
    assert serve("minimax-m2", *ENGINE) == 3
    said = capsys.readouterr().err
    assert "reads the checkpoint of minimax-m2, which is not here" in said and "kt pull" in said
    text = fake.server_args.read_text()
    fake.server_args.write_text(text.replace("'--max-total-tokens'", "'--max-tokens'"))
    assert serve(str(checkpoint), *ENGINE) == 1
    assert "--max-total-tokens is gone or renamed" in capsys.readouterr().err
    assert serve(str(checkpoint), *ENGINE, "--dry-run") == 1  # the same before it is started
    capsys.readouterr()
    fake.server_args.unlink()
    assert serve(str(checkpoint), *ENGINE) == 1
    assert "cannot read" in capsys.readouterr().err
    assert not (fake.package / "starts").exists()


# --- the files of a model -------------------------------------------------------------------------


def test_code_of_a_repository_is_named_and_has_to_be_there(checkpoint: Path) -> None:
    config = {"model_type": "qwen3_moe", "auto_map": {"AutoConfig": "configuration_x.Config"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert code_of(checkpoint, config).why == ""  # the engine knows the type
    other = {**config, "model_type": "new"}
    (checkpoint / "config.json").write_text(json.dumps(other))
    assert code_of(checkpoint, other).missing == ("configuration_x.py",)
    named = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikToken", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named))
    found = code_of(checkpoint, config)
    assert "tokenizer is Python code" in found.why and found.missing == ("tokenization_kimi.py",)
    with pytest.raises(UsageError, match=r"needs tokenization_kimi\.py .* kt does not download"):
        require_code(found, "kimi", checkpoint)
    (checkpoint / "tokenization_kimi.py").touch()
    require_code(code_of(checkpoint, config), "kimi", checkpoint)
    for strange in ({"auto_map": 3}, {"auto_map": {"a": "../../x.Y"}}, {"auto_map": ["", "x"]}):
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(strange))
        assert code_of(checkpoint, config).why == ""
    (checkpoint / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match="cannot read"):
        code_of(checkpoint, config)


def test_adapters_of_experts_are_told_apart(tmp_path: Path) -> None:
    for name, changes in (
        ("model.layers.0.self_attn.q_proj", False),
        ("m.mlp.experts.3.up_proj", True),
    ):
        head = json.dumps(
            {f"{name}.lora_A.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        )
        data = len(head).to_bytes(8, "little") + head.encode() + b"\0" * 4
        (tmp_path / "adapter_model.safetensors").write_bytes(data)
        assert changes_experts(tmp_path) is changes


# --- a server -------------------------------------------------------------------------------------

# kt on a machine with a GPU, as far as it asks.
HERE = """
import sys
from pathlib import Path
from ktcli.hardware.profile import read_machine
from ktcli.server.sglang import preparing
there = read_machine(Path("cloud-h200-128gb"))
preparing.machine_here = lambda: there
from ktcli.main import main
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def start(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HERE, "serve", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line_with(child: subprocess.Popen[str], text: str) -> str:
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return line
    raise AssertionError(f"it ended without {text!r}")


def test_a_server_is_listed_answers_chats_and_is_stopped(
    checkpoint: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, port = install_fake(), free_port()
    with start(str(checkpoint), *ENGINE, "--port", str(port)) as child:
        assert f"at http://127.0.0.1:{port} with sglang-kt 0.7.2" in line_with(child, "serving")
        row: dict[str, object] = {}

        def counts() -> bool:
            assert main(["ps", "--json"]) == 0
            row.update(*json.loads(capsys.readouterr().out))
            return bool(row["running"])

        until(counts)  # the engine is given a second to answer
        assert (row["engine"], row["running"], row["waiting"]) == ("sglang-kt 0.7.2", 3, 1)
        assert main(["ps"]) == 0
        assert "qwen (sglang-kt 0.7.2)" in capsys.readouterr().out
        assert main(["chat", "--server", f"http://127.0.0.1:{port}", "Hi there"]) == 0
        assert "Hello." in capsys.readouterr().out
        assert main(["stop", str(port)]) == 0
        assert child.wait(60) == 0
    log = home / "run" / f"{port}.engine.log"
    assert "fired up" in log.read_text() and all_ended(fake)


@pytest.mark.thorough
def test_an_engine_that_does_not_start_gives_kts_exit_code(checkpoint: Path) -> None:
    fake = install_fake()
    fake.does("start oom")
    with start(str(checkpoint), *ENGINE, "--port", str(free_port())) as child:
        said = child.communicate(timeout=60)[1]
    assert child.returncode == 10 and all_ended(fake)
    assert said.count("error: ") == 1 and "ran out of the GPUs' memory" in said
    assert "Traceback" not in said


def all_ended(fake: FakeSglang) -> bool:
    until(lambda: all(map(is_gone, fake.pids)))
    return True
