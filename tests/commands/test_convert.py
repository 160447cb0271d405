"""`kt convert` as people and scripts see it: output, exit codes, and where the files go."""

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from weights import quantised
from weights.fake_checkpoint import DEEPSEEK3, QWEN3, random_checkpoint, sources, write_checkpoint

from ktcli.assembly.prepare import converted, prepare
from ktcli.assembly.request import Wanted
from ktcli.commands import convert
from ktcli.main import main
from ktcli.manifest import FileRecord, Manifest
from ktcli.models import build
from ktcli.store import library
from ktcli.weights import encode
from ktcli.weights.check import lossless_format
from ktcli.weights.formats import FORMATS
from ktcli.weights.pack import Pack
from ktcli.weights.reader import open_checkpoint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    for name in ("KT_ISA", "KT_NUMA", "KT_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "source", QWEN3)


def test_a_folder(source: Path, tmp_path: Path, capsys):
    arguments = ["convert", str(source), "--out", str(tmp_path / "pack"), "--dense", "bf16"]
    assert main([*arguments, "--json"]) == 0
    words = json.loads(capsys.readouterr().out)
    assert words["path"] == str(tmp_path / "pack")
    assert (words["model"], words["experts"], words["dense"]) == ("source", "int4", "bf16")
    assert (words["files"], words["kept_files"], words["already_complete"]) == (4, 0, False)
    assert 0.05 < words["error"]["experts"] < 0.12 and words["error"]["dense"] == 0
    pack = Pack.open(tmp_path / "pack")
    assert words["size_bytes"] == pack.size_bytes
    speed = words["speed"]
    assert speed["bound_by"] in speed["ceilings_mb_per_s"] and speed["threads"] >= 1
    assert 0 < speed["mb_per_s"] <= min(speed["ceilings_mb_per_s"].values())
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "is already converted" in captured.out and captured.err == ""


def test_output_for_people(source: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "TELLING", 0.0)
    assert main(["convert", str(source), "--out", str(tmp_path / "pack")]) == 0
    captured = capsys.readouterr()
    assert "became" in captured.out and "int4" in captured.out and "%" in captured.out
    assert re.search(
        r"MB/s .* reading [\d,]+, encoding with \d+ threads? [\d,]+, writing", captured.out
    )
    assert captured.err == ""  # no progress where there is no terminal


def test_errors_stand_in_columns_of_one_order(source: Path, tmp_path: Path, capsys):
    """As wide as the longest name needs; dense parts last, whatever the first layer is made of."""
    out = str(tmp_path / "pack")
    assert main(["convert", str(source), "--out", out, "--experts", "int4-g128-f32"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " error " in line]
    assert [line.split()[:2] for line in lines] == [
        ["experts", "int4-g128-f32"],
        ["down", "int4-g128-f32"],
        ["dense", "int8"],
    ]
    assert len({line.index(" error ") for line in lines}) == 1


def test_a_model_of_the_library(home: Path, capsys):
    folder = random_checkpoint(home / "checkpoints" / "mine", QWEN3)
    files = tuple(
        FileRecord(path.name, path.stat().st_size, "0" * 64)
        for path in folder.iterdir()
        if path.suffix != ".md"
    )
    (folder / "kt-source.json").write_bytes(Manifest(files, "hf", "org/mine", "abc").encode())
    assert main(["convert", "mine", "--experts", "int8", "--json"]) == 0
    path = home / "packs" / "mine@int8-int8"
    assert json.loads(capsys.readouterr().out)["path"] == str(path)
    manifest = Pack.open(path).manifest
    assert (manifest.hub, manifest.repository, manifest.revision) == ("hf", "org/mine", "abc")
    entry = library.find("mine@int8-int8")
    assert entry is not None and entry.path == path and entry.source == "hf:org/mine@abc"


@contextmanager
def stopped_at(layer: int) -> Iterator[None]:
    """Conversions are interrupted when they come to this layer."""
    real = encode.Encoder.encode

    def interrupted(self, tensors):
        if tensors[0].layer == layer:
            raise KeyboardInterrupt
        return real(self, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode.Encoder, "encode", interrupted)
        yield


def test_ctrl_c_keeps_what_is_complete(source: Path, tmp_path: Path, capsys):
    arguments = ["convert", str(source), "--out", str(tmp_path / "pack"), "--json"]
    with stopped_at(2):
        assert main(arguments[:-1]) == 130
        assert "the same command again" in capsys.readouterr().err
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["kept_files"] == 2


def test_a_folder_of_ones_own_is_converted_to_where_a_chat_looks_for_it(source: Path, capsys):
    assert main(["convert", str(source), "--json"]) == 0
    ready = converted(str(source))
    assert ready is not None and str(ready.pack) == json.loads(capsys.readouterr().out)["path"]


def test_what_was_converted_is_what_a_chat_takes(source: Path, capsys):
    """Of a folder of one's own as of a name: in the formats there are, the usual ones first."""
    assert converted(str(source)) is None
    for experts, dense in (("int8", "bf16"), ("int4", "int8")):
        assert main(["convert", str(source), "--experts", experts, "--dense", dense, "--json"]) == 0
        path = json.loads(capsys.readouterr().out)["path"]
        ready = prepare(str(source), Wanted())
        assert ready == converted(str(source)) and str(ready.pack) == path
    assert prepare(str(source), Wanted(), formats="int8-bf16").pack.name.endswith("@int8-bf16")


def test_show_of_a_folder_names_its_conversions(source: Path, capsys):
    for experts in ("int4", "nl4"):
        assert main(["convert", str(source), "--experts", experts, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["show", str(source), "--json"]) == 0
    kinds = [place["kind"] for place in json.loads(capsys.readouterr().out)["on_disk"]]
    assert kinds == ["checkpoint", "pack", "pack"]
    (source / "config.json").touch()  # other files: those packs are of before
    assert main(["show", str(source), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["on_disk"]) == 1


def test_what_would_lose_less_is_a_command_that_can_be_typed(source: Path, capsys):
    """Only where scales are searched for, and nothing said how."""
    said = {}
    for formats in ((), ("--experts", "nl4"), ("--experts", "int8"), ("--calibrate", "off")):
        assert main(["convert", str(source), *formats, "--json"]) == 0
        said[formats[-1:]] = json.loads(capsys.readouterr().out)["calibrate"]
    assert said["nl4",] == f"kt convert {source} --experts nl4 --calibrate built-in"
    assert said[()] == f"kt convert {source} --calibrate built-in"
    assert said["int8",] is None and said["off",] is None


def test_a_conversion_by_its_name(source: Path, capsys):
    """What `kt list` says of an interrupted conversion goes on with it, and a conversion is not converted."""
    again = ["convert", "kt-mini@nl4-g32-mixed-int8"]
    with stopped_at(2):
        assert main(again) == 130
    assert main(["list"]) == 0
    assert f"interrupted; continue with: kt {' '.join(again)}" in capsys.readouterr().out
    assert main([*again, "--json"]) == 0
    words = json.loads(capsys.readouterr().out)
    assert (words["experts"], words["dense"]) == ("nl4-g32-mixed", "int8")
    assert words["kept_files"] == 2
    assert main(["convert", "kt-mini@int8-int8", "--experts", "int8"]) == 2
    assert "names its formats" in capsys.readouterr().err
    assert main(["convert", words["path"]]) == 3
    assert "is a conversion, not a checkpoint" in capsys.readouterr().err


def test_interrupted_work_on_a_folder_of_ones_own(source: Path, capsys):
    with stopped_at(2):
        assert main(["convert", str(source)]) == 130
    assert main(["list"]) == 0
    assert f"continue with: kt convert {source}@int4-int8\n" in capsys.readouterr().out


@pytest.mark.parametrize("experts", ["int8", "bf16", "auto"])
def test_calibrating_what_has_nothing_to_calibrate(experts: str, source: Path, capsys):
    """It is said, and the conversion is as without it."""
    arguments = ["convert", str(source), "--calibrate", __file__, "--experts", experts]
    assert main(arguments) == 0
    assert "--calibrate has no effect on" in capsys.readouterr().err


def test_mistakes(source: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    """Exit code, one sentence, and what to do next."""
    out = ["--out", str(tmp_path / "pack")]
    (tmp_path / "empty").mkdir()
    shard = source / "model.safetensors"
    cases = [
        (["convert", str(source), *out, "--experts", "int5"], 2, "no number format", "int4-g32"),
        (["convert", str(source), "--out", str(source)], 2, "is not empty", "--out"),
        (["convert", "kimi-k2"], 3, "not in the library", "kt pull kimi-k2"),
        (["convert", str(tmp_path / "empty")], 3, "no model in", "config.json"),
    ]
    for arguments, code, sentence, hint in cases:
        assert main(arguments) == code
        error = capsys.readouterr().err
        assert sentence in error and hint in error and error.count("\n") == 2
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["convert", str(source), *out, "--json"]) == 5
    captured = capsys.readouterr()
    document = json.loads(captured.out)["error"]
    assert document["type"] == "BadCheckpoint" and "truncated" in document["message"]
    assert "kt pull" in document["hint"]
    assert not (tmp_path / "pack").exists()


def test_help_has_examples(capsys):
    assert main(["convert", "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples:" in text and "kt convert qwen3-30b-a3b" in text
    assert ", ".join(FORMATS) in " ".join(text.split())


def test_what_a_conversion_lost_is_shown(source: Path, tmp_path: Path, capsys):
    """The report lies in the manifest, layer by layer; a mixed conversion loses less on the way back."""
    out = tmp_path / "pack"
    assert main(["convert", str(source), "--out", str(out), "--mixed", "--experts", "nl4"]) == 0
    capsys.readouterr()
    assert main(["show", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["on_disk"][0]["fidelity"]
    assert found["formats"] == {"experts": "nl4", "down": "int8-row", "dense": "int8"}
    layers = [row for row in found["files"] if "down" in row["error"]]
    assert layers
    for row in layers:
        assert row["error"]["down"] < 0.01 < 0.05 < row["error"]["experts"] < 0.12
        expected = 1 - row["error"]["experts"] ** 2 / 2
        assert row["cosine"]["experts"] == pytest.approx(expected, abs=1e-3)
    assert main(["show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "experts' down" in text and "worst layer" in text and "lowest cosine" in text
    shown = {
        line.split()[0]: line.split()[1:] for line in text.partition("  layer")[2].splitlines()[1:]
    }
    assert list(shown) == ["0", "1", "2", "outer"]
    for row in layers:
        expected = [
            part
            for kind in ("experts", "down", "dense")
            for part in (f"{row['error'][kind]:.2%}", f"{row['cosine'][kind]:.5f}")
        ]
        assert shown[row["file"][10]] == expected


def test_show_and_convert_say_the_same_error(source: Path, tmp_path: Path, capsys):
    assert main(["convert", str(source), "--out", str(tmp_path / "pack"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["error"]
    assert main(["show", str(tmp_path / "pack"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["on_disk"][0]["fidelity"]["error"] == said


def test_auto_says_what_it_chose(source: Path, tmp_path: Path, capsys):
    assert main(["convert", str(source), "--out", str(tmp_path / "pack"), "--experts", "auto"]) == 0
    captured = capsys.readouterr()
    assert "--experts auto: int8, the most precise that fits" in captured.err
    assert Pack.open(tmp_path / "pack").recipe.experts is FORMATS["int8"]


# --- quantized checkpoints, and those that contradict themselves ----------------------------------

KINDS = {
    "kimi": (
        partial(quantised.packed, bits=4, group=32, scale="BF16"),
        quantised.compressed(num_bits=4, group_size=32, strategy="group"),
        r".*\.experts\..*",
        "int4-g32",
    ),
    "gptq": (
        partial(quantised.gptq, group=32, reordered=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        r".*_proj\.weight",
        "int4-g32-f32",
    ),
    "awq": (
        partial(quantised.awq, group=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
        r".*_proj\.weight",
        None,
    ),
    "nvfp4": (
        partial(quantised.nvfp4, divides=False),
        quantised.modelopt("NVFP4", group_size=16),
        r".*(gate|up)_proj\.weight",
        None,
    ),
    "fp8 rows": (
        partial(quantised.fp8, scale="BF16", of="rows"),
        quantised.compressed(type="float", num_bits=8, strategy="channel"),
        r".*_proj\.weight",
        "fp8",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint_is_what_its_numbers_are(kind: str, tmp_path: Path, capsys):
    """The same files as from a checkpoint that holds these numbers as f32; modules that are not quantized stay as
    they are. In its lossless format the experts lose nothing."""
    make, config, which, lossless = KINDS[kind]
    one = {**QWEN3, "num_hidden_layers": 1}
    rng, config = np.random.default_rng(0), {**one, "quantization_config": config}
    stored, plain = {}, {}
    for name, (dtype, shape, data) in sources(one, "F32").items():
        if re.fullmatch(which, name):
            parts, values = make(name.removesuffix(".weight"), *shape, rng)
            stored.update(parts)
            plain[name] = ("F32", shape, values.tobytes())
        else:
            stored[name] = plain[name] = (dtype, shape, data)
    a = write_checkpoint(tmp_path / "a", config, stored, shards=3)
    b = write_checkpoint(tmp_path / "b", one, plain)
    with closing(open_checkpoint(a)) as checkpoint:
        found = lossless_format(build(checkpoint.config), checkpoint)
    assert (found.name if found else None) == lossless
    for source, out in ((a, "x"), (b, "y")):
        assert (
            main(["convert", str(source), "--out", str(tmp_path / out), "--experts", "int4"]) == 0
        )
    for path in (tmp_path / "x").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "y" / path.name).read_bytes()
    if lossless:
        capsys.readouterr()
        options = ["--experts", lossless, "--json"]
        assert main(["convert", str(a), "--out", str(tmp_path / "z"), *options]) == 0
        assert json.loads(capsys.readouterr().out)["error"]["experts"] == 0


def test_the_quantization_of_a_text_model(tmp_path: Path, capsys):
    """Kimi-K2.5 has pictures too, and says in its text's own config how that is quantized."""
    text = {**DEEPSEEK3, "model_type": "kimi_k2", "num_hidden_layers": 2}
    config = {"model_type": "kimi_k25", "vision_config": {}, "text_config": text}
    int4 = quantised.compressed(num_bits=4, group_size=32, strategy="group")
    rng, stored, plain = np.random.default_rng(0), {}, {}
    for name, (dtype, shape, data) in sources(config, "F32").items():
        stored[name] = plain[name] = (dtype, shape, data)
        if ".experts." in name:
            parts, values = quantised.packed(
                name.removesuffix(".weight"), *shape, rng, bits=4, group=32, scale="BF16"
            )
            del stored[name]
            stored.update(parts)
            plain[name] = ("F32", shape, values.tobytes())
    assert any(name.startswith("language_model.") for name in plain)
    said = {**config, "text_config": {**text, "quantization_config": int4}}
    packs = {"x": (said, stored), "y": (config, plain)}
    for out, (its, tensors) in packs.items():
        folder = write_checkpoint(tmp_path / f"s{out}", its, tensors, shards=2)
        line = ["convert", str(folder), "--out", str(tmp_path / out), "--experts", "int4-g32"]
        assert main([*line, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["error"]["experts"] == 0
    for path in (tmp_path / "x").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "y" / path.name).read_bytes()
    silent = write_checkpoint(tmp_path / "silent", config, stored)
    assert main(["convert", str(silent), "--out", str(tmp_path / "z")]) == 5
    assert "no packed integers" in capsys.readouterr().err and not (tmp_path / "z").exists()


@pytest.mark.parametrize("prefix", ["module.", "model.language_"])
def test_tensors_under_longer_names_are_shown(prefix: str, tmp_path: Path, capsys):
    """As tools for training leave them; the files are complete, so nobody is told to fetch them again."""
    longer = {
        f"{prefix}{name}": each for name, each in sources({**QWEN3, "num_hidden_layers": 1}).items()
    }
    folder = write_checkpoint(tmp_path / "s", {**QWEN3, "num_hidden_layers": 1}, longer)
    assert main(["convert", str(folder), "--out", str(tmp_path / "p"), "--json"]) == 5
    error = json.loads(capsys.readouterr().out)["error"]
    assert "has no tensor 'model." in error["message"]
    assert f"it has '{prefix}model." in error["hint"] and "save it again" in error["hint"]


EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"
MORE = ("BF16", (2,), bytes(4))
REFUSED = {
    "one missing": (lambda s: s.pop(EXPERT), {}, f"has no tensor '{EXPERT}'"),
    "many missing": (
        lambda s: [s.pop(name) for name in list(s) if ".experts.3.down_proj" in name or "norm" in name],
        {},
        r"has no tensor ('[^']+', ){4}'[^']+' and 11 more",
    ),
    "a bias that nobody asks for": (
        lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": MORE}),
        {},
        r"tensors that its config.json does not mention: 'model.layers.0.self_attn.q_proj.bias'$",
    ),
    "many left over": (
        lambda s: s.update({f"model.layers.0.more.{i}": MORE for i in range(9)}),
        {},
        r"does not mention: ('model.layers.0.more.\d', ){4}'model.layers.0.more.4' and 4 more$",
    ),
    "fewer experts": (lambda s: None, {"num_experts": 5}, r"has the shape \[6, 80\], but config.json requires \[5"),
    "more layers": (lambda s: None, {"num_hidden_layers": 4}, "has no tensor 'model.layers.3.mlp"),
    "fewer layers": (lambda s: None, {"num_hidden_layers": 2}, "not mention: 'model.layers.2.input_layernorm.weight'"),
    "another width": (lambda s: None, {"hidden_size": 96}, r"shape \[99, 80\], but config.json requires \[99, 96\]"),
    "quantized otherwise": (lambda s: None, {"quantization_config": {"quant_method": "hqq"}}, "'hqq'"),
    "unknown": (lambda s: None, {"model_type": "qwen3_mo"}, "model_type is 'qwen3_mo'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_written(what: str, tmp_path: Path, capsys):
    change, config, words = REFUSED[what]
    stored = sources(QWEN3)
    change(stored)
    folder = write_checkpoint(tmp_path / "s", {**QWEN3, **config}, stored, shards=2)
    assert main(["convert", str(folder), "--out", str(tmp_path / "p")]) == 5
    captured = capsys.readouterr()
    said, hint = captured.err.strip().split("\n")[0], captured.err.strip().split("\n")[1:]
    assert re.search(words, said), said
    assert hint and captured.out == "" and not (tmp_path / "p").exists()
    if what == "unknown":
        assert "the nearest name is qwen3_moe" in captured.err


def test_what_is_known_to_be_unneeded_is_left(tmp_path: Path):
    """Further layers, rotations, and biases of zeros beside quantized matrices."""
    stored = sources(QWEN3)
    names = (
        "model.layers.3.eh_proj.weight", "model.layers.3.mlp.up_proj.weight", "mtp.fc.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale",
    )  # fmt: skip
    name = "model.layers.0.self_attn.o_proj"
    parts, _ = quantised.gptq(name, 80, 96, np.random.default_rng(0), group=32)
    del stored[f"{name}.weight"]
    stored |= parts | dict.fromkeys(names, MORE) | {f"{name}.bias": ("F16", (80,), bytes(160))}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    config = {**QWEN3, "quantization_config": gptq}
    folder = write_checkpoint(tmp_path / "s", config, stored)
    assert main(["convert", str(folder), "--out", str(tmp_path / "p"), "--quiet"]) == 0
    stored[f"{name}.bias"] = ("F16", (80,), b"\1" * 160)
    write_checkpoint(tmp_path / "s", config, stored)
    assert main(["convert", str(folder), "--out", str(tmp_path / "q"), "--quiet"]) == 5
