"""Models that Ollama and LM Studio keep: found by name, used where they lie, whatever a manifest says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_cases import CASES
from gguf_models import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktcli.errors import BadCheckpoint, KtError, NotFound, UsageError
from ktcli.main import main
from ktcli.store import aliases, library, ollama
from ktcli.store.reference import parse

Capture = pytest.CaptureFixture[str]
KIND = "application/vnd.ollama.image."
DIGEST = "sha256:" + "0" * 64


class Store:
    """A store of Ollama's that the test fills."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def layer(self, kind: str, data: bytes | str) -> dict[str, Any]:
        data = data.encode() if isinstance(data, str) else data
        name = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs" / f"sha256-{name}").write_bytes(data)
        return {"mediaType": KIND + kind, "digest": f"sha256:{name}", "size": len(data)}

    def put(self, layers: Any, name: str = "registry.ollama.ai/library/mini/latest") -> Path:
        path = self.folder / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "kt"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(ollama, "_SERVICE", tmp_path / "service")
    return tmp_path


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home / ".ollama" / "models")


def document(arguments: list[str], capsys: Capture, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return json.loads(said.out)


# --- Ollama -----------------------------------------------------------------------------------


def test_from_ollamas_name_to_an_answer(store: Store, home: Path, capsys: Capture) -> None:
    case = next(case for case in CASES if case.name == "kt-mini-q8_0")
    model = store.layer("model", write_gguf(case, home / "mini.gguf").read_bytes())
    parameters = {"temperature": 0, "num_predict": 5, "mirostat": 1, "top_k": "many", "stop": ["~"]}
    layers = [
        model,
        store.layer("template", "{{ .Prompt }}"),
        store.layer("system", "Be brief."),
        store.layer("params", json.dumps(parameters)),
    ]
    store.put(layers)
    blob = store.folder / "blobs" / model["digest"].replace(":", "-")
    before = blob.stat()
    found = document(["pull", "ollama:mini", "--as", "wee"], capsys)
    assert (found["name"], found["path"], found["downloaded"]) == ("ollama:mini", str(blob), False)
    assert aliases.target_of("wee") == "ollama:mini"
    sets = {"system": "Be brief.", "temperature": 0.0, "stop": ["~"], "max-tokens": 5}
    for name in ("ollama:mini", "ollama:MINI:Latest", "wee"):
        assert document(["show", name], capsys)["preset"] == sets
    assert document(["plan", "wee"], capsys)["model"] == "ollama:mini"
    said = document(["chat", "wee", "Who are you?"], capsys)
    assert len(said["ids"]) == 5 and said["finish"] == "length"
    assert len(document(["chat", "ollama:mini", "Hi", "-n", "3"], capsys)["ids"]) == 3
    (pack,) = library.conversions()
    assert pack.label == "ollama-mini@int4-int8" and pack.source == "ollama:mini"
    assert document(["chat", "ollama:mini@int4-int8", "Hi"], capsys)["model"] == "ollama:mini"
    after = blob.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    assert not (home / "kt" / "checkpoints").exists()  # nothing was copied
    assert main(["pull", "ollama:mini"]) == 0
    told = capsys.readouterr().err
    assert "template is not used" in told and "mirostat is not used" in told and "top-k" in told


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("mini", "registry.ollama.ai/library/mini/latest"),
        ("mini:8b-q4_K_M", "registry.ollama.ai/library/mini/8b-q4_K_M"),
        ("eve/mini", "registry.ollama.ai/eve/mini/latest"),
        ("hf.co/org/Mini-GGUF:Q4_K_M", "hf.co/org/Mini-GGUF/Q4_K_M"),
        ("localhost:5000/eve/mini:1", "localhost:5000/eve/mini/1"),
    ],
)
def test_a_name_is_a_place_in_the_store(said: str, place: str, store: Store) -> None:
    model = store.layer("model", b"GGUF")
    store.put([model], place)
    found = ollama.find(f"ollama:{said}")
    assert found.text == f"ollama:{said}"
    assert list(ollama.names()) == [found.text]
    assert parse(f"ollama:{said}").folder == found.file
    assert parse(f"ollama:{said}@int4-int8").formats == "int4-int8"
    assert parse(found.text).lasting == found.text


@pytest.mark.parametrize(
    "said",
    ["", ":", "../x", "a/../b", "a/b/c/d", "/etc/passwd", "a:..", ".", "a\0", "a b", "-x", "a:b:c", "x" * 200],
)  # fmt: skip
def test_names_that_none_can_have(said: str, store: Store) -> None:
    with pytest.raises(UsageError):
        parse(f"ollama:{said}")


def test_what_is_not_there_names_what_is(store: Store, home: Path, capsys: Capture) -> None:
    for name in ("llama3", "mistral", "phi4", "qwen3"):
        store.put([], f"registry.ollama.ai/library/{name}/latest")
    store.put([], "registry.ollama.ai/library/qwen3/30b")
    error = document(["pull", "ollama:qwen3:8b"], capsys, 3)["error"]
    assert error["hint"] == "there are: ollama:qwen3:30b, ollama:qwen3"
    error = document(["chat", "ollama:other", "hi"], capsys, 3)["error"]
    assert error["hint"].endswith("and 2 more")
    os.environ["OLLAMA_MODELS"] = str(home / "none")
    try:
        assert "kt looks in" in document(["plan", "ollama:x"], capsys, 3)["error"]["hint"]
    finally:
        del os.environ["OLLAMA_MODELS"]


def test_manifests_that_lead_nowhere(store: Store, home: Path) -> None:
    outside = home / "secret"
    outside.write_text("GGUF")
    model = store.layer("model", b"GGUF" + b"\0" * 100)
    here = store.folder / "blobs"
    (here / ("sha256-" + "1" * 64)).symlink_to(home)
    (here / ("sha256-" + "2" * 64)).symlink_to(outside)
    os.mkfifo(here / ("sha256-" + "3" * 64))
    named = lambda digest, **more: [{"mediaType": KIND + "model", "digest": digest, **more}]  # noqa: E731
    for layers, said in (
        (named("sha256:../../secret"), "not SHA-256"),
        (named(str(outside)), "not SHA-256"),
        (named("sha256:" + "A" * 64), "not SHA-256"),
        (named({"a": 1}), "not SHA-256"),
        (named(DIGEST), "cannot read"),
        (named("sha256:" + "1" * 64), "not a plain file"),
        (named("sha256:" + "3" * 64), "not a plain file"),
        ([{**model, "size": 5}], "its manifest says 5 B"),
        ([model, model], "several model files"),
        ([model, store.layer("adapter", "x")], "has an adapter"),
        ([{"mediaType": KIND + "tensor; name=x", "digest": DIGEST}], "is stored as safetensors"),
        ([], "has no model file"),
        ([1], "a layer without a media type"),
        ({}, "no list of"),
        ([{"mediaType": "x"}] * 1001, "no list of"),
        ([model, store.layer("params", "[" * 9000)], "is not readable JSON"),
        ([model, store.layer("system", b"\xff")], "codec can't decode"),
        ([model, store.layer("system", b"x" * (1 << 19))], "cannot be read"),
    ):
        store.put(layers)
        with pytest.raises((BadCheckpoint, NotFound)) as caught:
            parse("ollama:mini")
        assert said in str(caught.value), said
    store.put(named("sha256:" + "2" * 64, size=4))  # a link to a plain file is one
    assert parse("ollama:mini").folder == here / ("sha256-" + "2" * 64)
    store.put([model, store.layer("system", "a\x1b[2J")])
    found = ollama.find("ollama:mini")
    assert not found.preset and "control character" in found.unused[0]
    path = store.put([])
    for text in ("", "[]", "{", '{"layers": null}', "x" * (1 << 21)):
        path.write_text(text)
        with pytest.raises(BadCheckpoint):
            parse("ollama:mini")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(DIGEST),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["layers", "mediaType", "digest", "size", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.dictionaries(st.sampled_from(["mediaType", "digest", "size"]), JSON), max_size=3)
    | JSON
)
def test_any_manifest_is_a_model_or_an_error(store: Store | None, layers: Any) -> None:
    assert store is not None
    store.put(layers)
    with pytest.raises(KtError) as caught:
        ollama.find("ollama:mini")
    assert len(str(caught.value)) <= 2000


def test_an_alias_of_what_is_gone_drops_no_other(store: Store, home: Path, capsys: Capture) -> None:
    manifest = store.put([store.layer("model", b"GGUF")])
    aliases.save("wee", "ollama:mini")
    aliases.save("big", "kimi-k2")
    manifest.unlink()
    states = {row["alias"]: row["state"] for row in document(["alias"], capsys)["aliases"]}
    assert "there is no model 'mini'" in states["wee"] and states["big"] == "kt pull big"
    document(["list"], capsys)
    assert document(["chat", "wee", "hi"], capsys, 3)["error"]["hint"]


def test_a_modelfile_names_a_model_of_ollamas(store: Store, home: Path, capsys: Capture) -> None:
    model = store.layer("model", b"GGUF")
    store.put([model])
    file = home / "Modelfile"
    blob = store.folder / "blobs" / model["digest"].replace(":", "-")
    for said, meant in (("mini", "ollama:mini"), (str(blob), str(blob))):
        file.write_text(f"FROM {said}\nSYSTEM Hi.\n")
        assert document(["alias", "mine", "-f", str(file)], capsys)["model"] == meant
    assert library.resolve("mine").path == blob


# --- LM Studio --------------------------------------------------------------------------------


@pytest.fixture
def studio(home: Path) -> Callable[..., Path]:
    def put(name: str, top: str = ".lmstudio/models") -> Path:
        path = home / top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
        return path

    return put


def test_names_of_lm_studio(studio: Callable[..., Path], home: Path) -> None:
    one = studio("pub/Mini-GGUF/Mini-Q4_K_M.gguf")
    two = studio("pub/Mini-GGUF/Mini-Q8_0.gguf")
    studio("pub/Mini-GGUF/mmproj-Mini.gguf")
    large = studio("other/Large-GGUF/Large-00001-of-00002.gguf")
    studio("other/Large-GGUF/Large-00002-of-00002.gguf")
    studio(".hidden/x/y.gguf")
    studio("pub/empty/README.md")
    for said, meant in {
        "pub/Mini-GGUF": one.parent,
        "PUB/mini-gguf": one.parent,
        "mini-gguf": one.parent,
        "other": large.parent,
        "Mini-Q8_0.gguf": two,
        "mini-q8_0": two,
        "pub/mini-gguf/mini-q4_k_m.gguf": one,
        "q4_k": one,
        "Large-00001-of-00002": large,
    }.items():
        assert parse(f"lmstudio:{said}").folder == meant, said
    with pytest.raises(UsageError, match="2 models of LM Studio are called 'gguf'") as caught:
        parse("lmstudio:gguf")
    assert "lmstudio:other/Large-GGUF, lmstudio:pub/Mini-GGUF" in caught.value.hint
    with pytest.raises(NotFound) as missing:
        parse("lmstudio:nothing")
    assert "there are: lmstudio:other/Large-GGUF" in missing.value.hint
    for wrong in ("", "/", "../x", "a/../b", "x" * 600):
        with pytest.raises(UsageError):
            parse(f"lmstudio:{wrong}")


def test_where_lm_studio_keeps_its_files(studio: Callable[..., Path], home: Path) -> None:
    old = studio("pub/old/old.gguf", ".cache/lm-studio/models")
    assert parse("lmstudio:old").folder == old.parent
    moved = studio("pub/moved/moved.gguf", "disk/models")
    (home / ".lmstudio-home-pointer").write_text(f"{home}/disk\n")
    assert parse("lmstudio:moved").folder == moved.parent
    far = studio("pub/far/far.gguf", "far")
    where = home / "disk" / "settings.json"
    where.write_text(json.dumps({"downloadsFolder": str(home / "far")}))
    assert parse("lmstudio:far").folder == far.parent
    for hostile in ("{", '{"downloadsFolder": 1}', '{"downloadsFolder": "../x"}', "[" * 99_999):
        where.write_text(hostile)
        assert parse("lmstudio:moved").folder == moved.parent
    (home / ".lmstudio-home-pointer").write_bytes(b"\xff" * 20_000)
    assert parse("lmstudio:old").folder == old.parent
