"""Which hub a model is taken from: in turn, the named one alone, never around a licence; caches, endpoints, tokens."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from store.fake_hub import COMMIT, Fault, Hub, serve
from weights.fake_checkpoint import QWEN3, random_checkpoint

from ktcli import manifest
from ktcli.errors import Gated, NotFound, UsageError
from ktcli.main import main
from ktcli.store import download, integrity, library
from ktcli.store.choice import candidates, look, only_from
from ktcli.store.hubs import hub_named
from ktcli.store.reference import parse

Capture = pytest.CaptureFixture[str]
SECRETS = {"HF_TOKEN": "hf_verysecretword", "MODELSCOPE_API_TOKEN": "ms-verysecretword"}


class Silent:
    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None: ...
    def advance(self, n_bytes: int) -> None: ...
    def end(self) -> None: ...


@pytest.fixture(autouse=True)
def hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Hub]]:
    """Hugging Face and ModelScope."""
    with serve() as first, serve() as second:
        monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", first.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", second.url)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        yield first, second


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = random_checkpoint(tmp_path_factory.mktemp("tiny"), QWEN3)
    wanted = ("config.json", "model.safetensors", "tokenizer.json")
    return {name: (folder / name).read_bytes() for name in wanted}


def source_of(name: str) -> str:
    found = manifest.read(library.resolve(name).path / manifest.CHECKPOINT)
    assert found is not None
    return f"{found.hub}:{found.repository}"


# --- in turn ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["not there", "unreachable", "503"])
def test_the_second_hub_is_asked_where_the_first_has_nothing(
    trouble: str,
    hubs: tuple[Hub, Hub],
    files: dict[str, bytes],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hubs[1].repositories["org/tiny"] = files
    if trouble == "unreachable":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hubs[0].status = 503 if trouble == "503" else 0
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert main(["pull", "org/tiny", "--yes"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "; trying" in line]
    assert len(told) == 1 and "Hugging Face" in told[0] and "org/tiny on ModelScope" in told[0]
    assert source_of("org/tiny") == "ms:org/tiny"
    assert library.resolve("org--tiny").path.name == "org--tiny"


def test_a_licence_is_not_gone_around(hubs: tuple[Hub, Hub], files: dict[str, bytes]) -> None:
    hubs[0].status, hubs[0].error_code = 403, "GatedRepo"
    hubs[1].repositories["Qwen/Qwen3-30B-A3B"] = files
    with pytest.raises(Gated, match="is gated") as caught:
        look(parse("qwen3-30b-a3b"))
    assert "kt pull qwen3-30b-a3b --from modelscope" in caught.value.hint
    assert hubs[1].requests == []


def test_where_no_hub_has_it_both_are_named(hubs: tuple[Hub, Hub]) -> None:
    with pytest.raises(NotFound, match=r"on Hugging Face.*; .*on ModelScope"):
        look(parse("org/tiny"))


def test_a_hub_that_was_named_is_asked_alone(hubs: tuple[Hub, Hub]) -> None:
    for text, asked in (("hf:org/tiny", 0), ("ms:org/tiny", 1), ("org/tiny@main", 0)):
        with pytest.raises(NotFound):
            look(parse(text))
        assert hubs[asked].requests and not hubs[1 - asked].requests
        hubs[asked].requests.clear()


def test_candidates_have_the_ids_of_each_hub() -> None:
    known = candidates(parse("mixtral-8x7b"))
    assert [hub for hub, _ in known] == ["hf", "ms"] and known[0][1] != known[1][1]
    assert candidates(parse("mistralai/Mixtral-8x7B-Instruct-v0.1")) == known
    assert dict(candidates(parse("zai-org/GLM-5.3-Flash")))["ms"] == "ZhipuAI/GLM-5.3-Flash"
    assert candidates(parse("org/tiny")) == (("hf", "org/tiny"), ("ms", "org/tiny"))


def test_from_is_the_only_hub(
    hubs: tuple[Hub, Hub], files: dict[str, bytes], capsys: Capture
) -> None:
    for hub in hubs:
        hub.repositories["org/tiny"] = files
    assert main(["pull", "org/tiny", "--from", "modelscope", "--yes"]) == 0
    assert hubs[0].requests == [] and source_of("ms:org/tiny") == "ms:org/tiny"
    assert only_from(parse("org/a:Q4_K_M"), "ms").name == "ms--org--a--gguf-Q4_K_M"
    assert only_from(parse("mixtral-8x7b"), "ms").name == "mixtral-8x7b"
    assert candidates(only_from(parse("mixtral-8x7b"), "ms"))[0][0] == "ms"
    assert only_from(parse("ms:org/a"), "ms").hub == "ms"
    for text in ("ms:org/a", "kt-mini", "./folder"):
        with pytest.raises(UsageError, match="--from"):
            only_from(parse(text), "hf")
    capsys.readouterr()


# --- caches of the clients --------------------------------------------------------------------


def asked(hub: Hub, files: dict[str, bytes]) -> list[str]:
    return [line for line in hub.requests if line.rpartition("/")[2] in files]


def test_the_cache_of_hugging_face_is_used(
    hubs: tuple[Hub, Hub], files: dict[str, bytes], tmp_path: Path
) -> None:
    hubs[0].repositories["org/tiny"] = files
    root = tmp_path / "hf" / "models--org--tiny"
    for folder in ("blobs", f"snapshots/{COMMIT}", "refs"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for number, (name, data) in enumerate(files.items()):
        (root / "blobs" / str(number)).write_bytes(data)
        (root / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{number}")
    entry = download.pull(parse("org/tiny"), Silent())
    assert not hubs[0].sent and not asked(hubs[0], files)
    assert {name: (entry.path / name).read_bytes() for name in files} == files
    assert not any(path.is_symlink() for path in entry.path.iterdir())
    shutil.rmtree(root)
    assert integrity.digest(entry.path / "model.safetensors")


def test_files_of_another_revision_in_the_cache_are_used(
    hubs: tuple[Hub, Hub], files: dict[str, bytes], tmp_path: Path
) -> None:
    hubs[0].repositories["org/tiny"] = files
    blobs = tmp_path / "hf" / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    for file in hub_named("hf").look("org/tiny", "").files:
        (blobs / (file.sha256 or file.blob)).write_bytes(files[file.name])
    entry = download.pull(parse("org/tiny"), Silent())
    assert not hubs[0].sent and not asked(hubs[0], files)
    assert {name: (entry.path / name).read_bytes() for name in files} == files


@pytest.mark.parametrize(
    "place",
    [
        "models/org--ti.ny/snapshots/master",
        "models/org/ti___ny",
        "hub/models/org/ti___ny",
        "hub/models/org/ti.ny",
        "org/ti___ny",
    ],
)
def test_the_caches_of_modelscope_are_used(
    place: str, hubs: tuple[Hub, Hub], files: dict[str, bytes], tmp_path: Path
) -> None:
    hubs[1].repositories["org/ti.ny"] = files
    folder = tmp_path / "ms" / place
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    entry = download.pull(parse("ms:org/ti.ny"), Silent())
    assert not hubs[1].sent and not asked(hubs[1], files)
    assert {name: (entry.path / name).read_bytes() for name in files} == files


def test_a_cached_file_with_other_bytes_is_fetched(
    hubs: tuple[Hub, Hub], files: dict[str, bytes], tmp_path: Path
) -> None:
    hubs[1].repositories["org/tiny"] = files
    folder = tmp_path / "ms" / "models/org--tiny/snapshots/master"
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    entry = download.pull(parse("ms:org/tiny"), Silent())
    assert {name: (entry.path / name).read_bytes() for name in files} == files


# --- endpoints and tokens ---------------------------------------------------------------------


def test_the_older_variable_of_modelscope(
    hubs: tuple[Hub, Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELSCOPE_ENDPOINT")
    monkeypatch.setenv("MODELSCOPE_DOMAIN", hubs[1].url)
    with pytest.raises(NotFound):
        look(parse("ms:org/tiny"))
    assert hubs[1].requests
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "www.modelscope.ai")
    assert getattr(hub_named("ms"), "endpoint", "") == "https://www.modelscope.ai"
    for said in ("", "a b", "x/../y", "ftp://x"):
        monkeypatch.setenv("MODELSCOPE_DOMAIN", said)
        with pytest.raises(UsageError, match=f"MODELSCOPE_DOMAIN is '{said}'") as caught:
            hub_named("ms")
        assert "unset MODELSCOPE_DOMAIN" in caught.value.hint


@pytest.mark.each_once
@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("where", ["the list", "a file"])
def test_tokens_are_never_printed(
    where: str,
    status: int,
    debug: str,
    hubs: tuple[Hub, Hub],
    files: dict[str, bytes],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KT_DEBUG", debug)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for hub in hubs:
        hub.repositories["org/tiny"] = files
        hub.status = status if where == "the list" else 0
        hub.script["model.safetensors"].extend([Fault(status=status)] * 40)
        hub.facts = {"gated": "manual"}
    for command in (["pull", "org/tiny", "--yes"], ["pull", "ms:org/tiny", "--yes"],
                    ["pull", "org/tiny", "--json"], ["search", "tiny", "--hub"],
                    ["plan", "org/tiny"]):  # fmt: skip
        main(command)
        said = capsys.readouterr()
        assert "verysecretword" not in said.out + said.err
    assert any("verysecretword" in json.dumps(seen) for hub in hubs for seen in hub.seen) or (
        where == "the list"
    )
