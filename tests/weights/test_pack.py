"""The pack: its files are what the specification says, and a damaged one is refused."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from convert import convert
from loading import load_engine
from safetensors import safe_open
from timelines import logits_of
from weights.fake_checkpoint import DEEPSEEK3, damaged, random_checkpoint

from ktcli.errors import BadPack, UsageError
from ktcli.manifest import Seal, encode_record, parse
from ktcli.models import build
from ktcli.native import Pool
from ktcli.ops.tensors import Role
from ktcli.weights.destination import PART
from ktcli.weights.formats import INT8_BEFORE
from ktcli.weights.pack import Pack, is_pack
from ktcli.weights.recipe import Recipe, format_of, stored_bytes

MODEL = build(DEEPSEEK3)
LAYER = "layer-00001.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    source = random_checkpoint(folder / "source", DEEPSEEK3, shards=2)
    convert(source, folder / "pack", Recipe(), Pool(2, spin_us=0))
    return folder / "pack"


@pytest.fixture
def pack(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "pack"))


def test_one_file_per_layer(original: Path):
    names = sorted(path.name for path in original.iterdir())
    layers = [f"layer-{i:05}.safetensors" for i in range(3)]
    assert names == ["config.json", "kt.json", *layers, "outer.safetensors", "tokenizer.json"]


def test_locate_finds_every_tensor(original: Path):
    pack = Pack.open(original)
    assert (pack.family, pack.recipe) == (MODEL.spec.family, Recipe())
    assert pack.config == DEEPSEEK3
    for tensor in MODEL.tensors:
        place = pack.locate(tensor)
        wanted = "outer" if tensor.layer is None else f"layer-{tensor.layer:05}"
        assert place.path == original / f"{wanted}.safetensors"
        assert place.size_bytes == stored_bytes(tensor, pack.recipe)
    assert damaged(original) == []


def test_the_safetensors_library_reads_it(original: Path):
    """Keys, types, shapes and bytes as the library sees them; packed first, vectors last, aligned."""
    pack = Pack.open(original)
    for record in pack.manifest.files:
        path = original / record.name
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        assert start % 64 == 0
        mine = [t for t in MODEL.tensors if pack.locate(t).path == path]
        with safe_open(path, "np") as file:
            assert sorted(file.keys()) == sorted(tensor.name for tensor in mine)
            for tensor in mine:
                place = pack.locate(tensor)
                if tensor.role is Role.TABLE:  # numpy has no bf16
                    assert file.get_slice(tensor.name).get_dtype() == "BF16"
                    assert file.get_slice(tensor.name).get_shape() == [tensor.n, tensor.k]
                    continue
                data = file.get_tensor(tensor.name)
                assert data.tobytes() == raw[place.offset : place.offset + place.size_bytes]
                if format_of(tensor, pack.recipe) is None:
                    assert data.dtype == np.float32 and data.shape == (tensor.k,)
                else:
                    assert data.dtype == np.uint8 and data.shape[0] == tensor.count
                    assert place.offset % 64 == 0
        order = sorted(mine, key=lambda t: pack.locate(t).offset)
        ranks = [{Role.TABLE: 1, Role.VECTOR: 2}.get(tensor.role, 0) for tensor in order]
        assert ranks == sorted(ranks)
        end = start
        for tensor in order:
            assert pack.locate(tensor).offset == end
            end += pack.locate(tensor).size_bytes
        assert end == len(raw) == record.size_bytes


def test_manifest_tells_nothing_of_the_machine(original: Path):
    document = json.loads((original / "kt.json").read_text())
    assert list(document) == [
        "kt_pack", "family", "source", "recipe", "formats", "extras", "files", "sha256",
    ]  # fmt: skip
    assert list(document["source"]) == ["hub", "repository", "revision", "digest"]
    assert str(original.parent) not in json.dumps(document)


def test_manifest_comes_back(original: Path):
    data = (original / "kt.json").read_bytes()
    manifest = parse(data)
    assert manifest.encode() == data
    assert parse(manifest.encode(indent=None)) == manifest
    assert all(0 < record.error["dense"] < 0.02 for record in manifest.files)
    assert 0.05 < manifest.files[1].error["experts"] < 0.12


@pytest.mark.parametrize("experts", ["int8-row", "nl4-g32-mixed"])
def test_int8_of_an_older_pack_is_as_it_was(tmp_path: Path, experts: str):
    """It was not rotated, and it is called int8 in the manifest and the headers."""
    source = random_checkpoint(tmp_path / "source", DEEPSEEK3)
    now = Recipe.named(experts, "int8-row")
    then = replace(
        now, dense=INT8_BEFORE, **({"down": INT8_BEFORE} if now.down else {"experts": INT8_BEFORE})
    )
    folders = {name: tmp_path / name for name in ("now", "then")}
    for folder, recipe in zip(folders.values(), (now, then), strict=True):
        convert(source, folder, recipe, Pool(2, spin_us=0))
    pack = Pack.open(folders["then"])
    assert pack.recipe == then and pack.recipe.name == now.name.replace("int8-row", "int8")
    ids = [5, 60, 7, 90, 11, 2]
    one, two = (logits_of(load_engine(f, all_logits=True).session(), ids) for f in folders.values())
    assert np.array_equal(one, two)
    asked = Recipe.named(*(("int8",) if not now.down else (experts,)), "int8")
    before = folders["then"].stat().st_mtime_ns
    convert(source, folders["then"], asked, Pool(2, spin_us=0))
    assert (
        Pack.open(folders["then"]).recipe == then and folders["then"].stat().st_mtime_ns == before
    )


def test_an_older_conversion_that_was_interrupted_is_not_gone_on_with(tmp_path: Path):
    """Its first files have another int8; they stay, and the hint says what to do."""
    source = random_checkpoint(tmp_path / "source", DEEPSEEK3)
    done, folder = tmp_path / "done", tmp_path / "begun"
    old = Recipe(dense=INT8_BEFORE)
    convert(source, done, old, Pool(2, spin_us=0))
    pack = Pack.open(done)
    folder.mkdir()
    shutil.copy(done / "layer-00000.safetensors", folder)
    begun = replace(pack.manifest, files=())
    first = next(each for each in pack.manifest.files if each.name == "layer-00000.safetensors")
    line = json.dumps(encode_record(first)).encode() + b"\n"
    (folder / PART).write_bytes(begun.encode(indent=None) + line)
    with pytest.raises(UsageError, match="an earlier kt began") as caught:
        convert(source, folder, Recipe(), Pool(2, spin_us=0))
    assert f"remove the folder {folder}" in caught.value.hint
    assert (folder / "layer-00000.safetensors").exists()


def test_manifest_of_a_published_model():
    text = b"""{"kt_pack": 1, "family": "x", "source": {"hub": "hf", "repository": "a/b", "revision": "c",
      "digest": "d"}, "recipe": {"experts": "bf16", "dense": "bf16"}, "formats": {"bf16": {"bits": 16,
      "group": 0, "scale": "none", "codebook": []}}, "extras": [], "files": []}"""
    manifest = parse(text)
    assert (manifest.hub, manifest.repository, manifest.revision) == ("hf", "a/b", "c")


def test_a_manifest_watches_itself(original: Path):
    """Whatever bit changes, it is no manifest any more, or not the one that was written."""
    data = (original / "kt.json").read_bytes()
    assert parse(data).seal is Seal.INTACT
    draw = random.Random(7)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << draw.randrange(8)
        with contextlib.suppress(ValueError):
            assert parse(bytes(changed)).seal is Seal.BROKEN, bytes(changed[at - 20 : at + 20])


def test_a_manifest_without_a_hash_of_itself_is_read(original: Path):
    document = json.loads((original / "kt.json").read_text())
    del document["sha256"]
    found = parse(json.dumps(document).encode())
    assert found.seal is Seal.NONE and found.files
    assert parse(json.dumps({**document, "sha257": ""}).encode()).seal is Seal.BROKEN


# --- what is damaged or hostile -------------------------------------------------------------------


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the manifest as a JSON document."""

    def apply(pack: Path) -> None:
        document = json.loads((pack / "kt.json").read_text())
        change(document)
        (pack / "kt.json").write_text(json.dumps(document))

    return apply


def flip(name: str, at: int) -> Callable[[Path], None]:
    def apply(pack: Path) -> None:
        raw = bytearray((pack / name).read_bytes())
        raw[at] ^= 1
        (pack / name).write_bytes(raw)

    return apply


def link_out(pack: Path) -> None:
    (pack / LAYER).rename(pack.parent / "elsewhere")
    (pack / LAYER).symlink_to(pack.parent / "elsewhere")


def swap(pack: Path) -> None:
    """Two layers of equal size change places: every tensor of both is then in the wrong file."""
    (pack / LAYER).rename(pack / "x")
    (pack / "layer-00002.safetensors").rename(pack / LAYER)
    (pack / "x").rename(pack / "layer-00002.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda p: (p / "kt.json").unlink(), "does not contain a converted model"),
    "empty manifest": (lambda p: (p / "kt.json").write_text(""), "is not JSON"),
    "manifest is a list": (lambda p: (p / "kt.json").write_text("[1]"), "holds a list"),
    "manifest nests": (lambda p: (p / "kt.json").write_text("[" * 200_000), "is not readable JSON"),
    "huge manifest": (lambda p: (p / "kt.json").write_text(" " * 11_000_000), "larger than 9.5 MiB"),
    "future version": (edit(lambda d: d.update(kt_pack=2)), "is from a newer kt: it has pack version 2"),
    "past version": (edit(lambda d: d.update(kt_pack=0)), "kt.json has pack version 0; this kt reads version 1"),
    "version of two lines": (edit(lambda d: d.update(kt_pack="a\nb")), r"pack version 'a\\nb'"),
    "no version": (edit(lambda d: d.pop("kt_pack")), "pack version None"),
    "no files": (edit(lambda d: d.pop("files")), "no list 'files'"),
    "files is text": (edit(lambda d: d.update(files="x")), "no list 'files'"),
    "file is text": (edit(lambda d: d["files"].append("x")), "not an object"),
    "file outside": (edit(lambda d: d["files"][0].update(name="../x.safetensors")), "is outside the folder"),
    "file absolute": (edit(lambda d: d["files"][0].update(name="/etc/passwd")), "is outside the folder"),
    "file twice": (edit(lambda d: d["files"].append(d["files"][0])), "lists a file twice"),
    "file unknown": (edit(lambda d: d["files"][0].update(name="x.safetensors")), "lists an invalid weight file"),
    "extra outside": (edit(lambda d: d["extras"][0].update(name="../config.json")), "is outside the folder"),
    "extra unknown": (edit(lambda d: d["extras"][0].update(name="run.py")), "does not belong"),
    "negative size": (edit(lambda d: d["files"][0].update(size_bytes=-1)), "size or hash"),
    "size is true": (edit(lambda d: d["files"][0].update(size_bytes=True)), "size or hash"),
    "size is text": (edit(lambda d: d["files"][0].update(size_bytes="9")), "size or hash"),
    "huge size": (edit(lambda d: d["files"][0].update(size_bytes=10**20)), "instead of"),
    "short hash": (edit(lambda d: d["files"][0].update(sha256="ab")), "size or hash"),
    "no hash": (edit(lambda d: d["files"][0].pop("sha256")), "no string 'sha256'"),
    "error is text": (edit(lambda d: d["files"][0].update(error={"experts": "x"})), "an impossible"),
    "error is huge": (edit(lambda d: d["files"][0].update(error={"down": 1e300})), "an impossible"),
    "cosine is true": (edit(lambda d: d["files"][0].update(cosine={"down": True})), "an impossible"),
    "no recipe": (edit(lambda d: d.pop("recipe")), "no object 'recipe'"),
    "f32 is a text": (edit(lambda d: d["recipe"].update(f32="router")), "'f32' that is not a list"),
    "f32 names no part": (edit(lambda d: d["recipe"].update(f32=["gate"])), "part of a model 'gate'"),
    "unknown format": (edit(lambda d: d["recipe"].update(experts="int3")), "format 'int3'"),
    "format is a list": (edit(lambda d: d["recipe"].update(experts=[])), "no string 'experts'"),
    "format means another": (edit(lambda d: d["formats"]["int4"].update(group=32)), "format 'int4'"),
    "file missing": (lambda p: (p / LAYER).unlink(), f"{LAYER} is missing"),
    "file short": (lambda p: (p / LAYER).write_bytes(b"x"), "1 bytes instead of"),
    "file is a link": (link_out, f"{LAYER} is missing"),
    "header damaged": (flip(LAYER, 8), "header of .* is damaged"),
    "header length damaged": (flip(LAYER, 7), "claims a header of 72057594037930104 bytes"),
    "config damaged": (flip("config.json", 5), "config.json does not match"),
    "config missing": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "config not listed": (edit(lambda d: d["extras"].pop(0)), "config.json does not match"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_pack(pack: Path, what: str):
    damage, words = DAMAGE[what]
    damage(pack)
    with pytest.raises(BadPack, match=words) as caught:
        Pack.open(pack)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", LAYER])
def test_verify_finds_a_flipped_bit(pack: Path, name: str):
    flip(name, -1)(pack)
    Pack.open(pack)
    assert damaged(pack) == [name]


def test_layers_that_changed_places(pack: Path):
    swap(pack)
    Pack.open(pack)  # sizes agree, names are unique
    assert len(damaged(pack)) == 2


def test_locate_refuses_another_tensor(original: Path):
    pack = Pack.open(original)
    tensor = next(t for t in MODEL.tensors if t.role is Role.EXPERTS)
    with pytest.raises(BadPack, match="no tensor nothing"):
        pack.locate(replace(tensor, name="nothing"))
    for other in (
        replace(tensor, n=tensor.n * 2, count=tensor.count // 2),
        replace(tensor, k=tensor.k - 1),
        replace(tensor, role=Role.DENSE),
        replace(tensor, alternate=not tensor.alternate),
    ):
        with pytest.raises(BadPack, match="but the model needs"):
            pack.locate(other)


def test_is_pack(original: Path, tmp_path: Path):
    assert is_pack(original)
    assert not is_pack(tmp_path) and not is_pack(tmp_path / "nothing")
