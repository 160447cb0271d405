"""How embedding models pool, read from the files of sentence-transformers and of GGUF, honest and hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from convert import convert_checkpoint
from embedders import CONTEXT, HIDDEN, MODES, VOCAB, modules, write_embedder, write_pooling

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.models.pooling import KEY, PoolingMode, TextPooling
from ktcli.weights.checkpoint import Checkpoint, read_config
from ktcli.weights.pack import Pack
from ktcli.weights.sentence import MAX_BYTES

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_pooling(tmp_path)
    return tmp_path


def pooling(folder: Path) -> TextPooling | None:
    return build(read_config(folder)).pooling


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, **values}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalize", [True, False])
def test_what_the_files_say_is_read(folder: Path, mode: str, normalize: bool) -> None:
    write_pooling(folder, mode, normalize=normalize, include_prompt=False)
    change(folder, "sentence_bert_config.json", max_seq_length=77, do_lower_case=False)
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    named = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "cosine"}
    change(folder, "config_sentence_transformers.json", **named)
    found = pooling(folder)
    assert found == TextPooling(PoolingMode(mode), normalize, False, prompts, "query", 77)


def test_without_these_files_a_model_generates_text(folder: Path) -> None:
    (folder / "modules.json").unlink()
    model = build(read_config(folder))
    assert model.pooling is None and not model.spec.embeds
    assert model.spec.output_width == VOCAB and model.tensors[-1].name == "lm_head"


@pytest.mark.parametrize(
    ("more", "lengths", "any_length"),
    [
        ({}, (), False),
        ({"is_matryoshka": True}, (), True),
        ({"matryoshka_dimensions": [64, 32, 64]}, (32, 64), False),
    ],
)
def test_a_config_says_whether_vectors_may_be_shortened(
    folder: Path, more: dict[str, Any], lengths: tuple[int, ...], any_length: bool
) -> None:
    change(folder, "config.json", **more)
    found = pooling(folder)
    assert found is not None and (found.lengths, found.any_length) == (lengths, any_length)


def _modules(*kinds: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "modules.json").write_text(json.dumps(modules(*kinds)))


def _of_pooling(**values: Any) -> Callable[[Path], object]:
    return lambda folder: change(folder, "1_Pooling/config.json", **values)


def _with(name: str, **values: Any) -> Callable[[Path], object]:
    return lambda folder: change(folder, name, **values)


def _path(path: Any, at: int = 1) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        said = modules("Transformer", "Pooling")
        said[at]["path"] = path
        (folder / "modules.json").write_text(json.dumps(said))

    return write


def _written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def _link(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").unlink()
    (folder / "1_Pooling" / "config.json").symlink_to("/etc/hostname")


_ST, _PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_written("modules.json", "[" * 100_000), "modules.json is not"),
        (_written("modules.json", "{}"), "modules.json must be a list"),
        (_written("modules.json", "[]"), "modules.json must be a list"),
        (_written("modules.json", "[1]"), "module 0 is not a JSON object"),
        (_written("modules.json", "x" * (MAX_BYTES + 1)), "modules.json"),
        (_written("modules.json", '[{"type": 7}]'), "type is 7, not a string"),
        (_written("modules.json", json.dumps(modules(*["Pooling"] * 17))), "1 to 16 modules"),
        (
            _modules("Transformer", "Pooling", "Dense"),
            "the modules Transformer, Pooling, Dense",
        ),
        (_modules("Transformer"), "the modules Transformer"),
        (_modules("Pooling", "Transformer"), "the modules Pooling, Transformer"),
        (_path("../1_Pooling"), "'../1_Pooling', not a folder next to it"),
        (_path("/etc"), "'/etc', not a folder next to it"),
        (_path("1_Pooling/.."), "not a folder next to it"),
        (_path("a\0b"), "not a folder next to it"),
        (_path(7), "path is 7, not a string"),
        (_path("elsewhere"), "config.json is missing"),
        (_path("0_Transformer", 0), "the path of the Transformer is '0_Transformer'"),
        (_link, "outside the model folder"),
        (_of_pooling(pooling_mode_lasttoken=False), "no pooling mode that kt knows"),
        (_of_pooling(pooling_mode_mean_tokens=True), "has pooling_mode_lasttoken and"),
        (
            _of_pooling(pooling_mode_lasttoken=False, pooling_mode_max_tokens=True),
            "has pooling_mode_max_tokens; kt pools with",
        ),
        (_of_pooling(pooling_mode_lasttoken="yes"), "'yes', not true or false"),
        (_of_pooling(word_embedding_dimension=HIDDEN + 1), f"dimensions {HIDDEN + 1} is not"),
        (_of_pooling(word_embedding_dimension=-1), "word_embedding_dimension is -1"),
        (_of_pooling(include_prompt=3), "include_prompt is 3"),
        (_with(_ST, max_seq_length="long"), "max_seq_length is 'long'"),
        (_with(_ST, max_seq_length=0), "max_seq_length is 0"),
        (_with(_ST, do_lower_case=True), "do_lower_case True is not supported"),
        (_written(_ST, "[]"), "holds a list"),
        (_with(_PROMPTS, prompts=[1]), "prompts must be an object"),
        (_with(_PROMPTS, prompts={"a": 1}), "prompts: 'a' must be a string"),
        (_with(_PROMPTS, prompts={"a": "x" * 10_001}), "at most 10,000 characters"),
        (_with(_PROMPTS, prompts={str(n): "" for n in range(65)}), "at most 64 strings"),
        (_with(_PROMPTS, prompts={}, default_prompt_name="query"), "'query' is not one of"),
        (_with(_PROMPTS, default_prompt_name=[]), "default_prompt_name is []"),
        (_with("config.json", is_causal=False), "is_causal False is not supported"),
        (_with("config.json", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (_with("config.json", matryoshka_dimensions=[0]), "matryoshka_dimensions must be"),
        (_with("config.json", matryoshka_dimensions=[HIDDEN + 1]), "matryoshka_dimensions must"),
        (_with("config.json", matryoshka_dimensions="64"), "matryoshka_dimensions must be"),
        (_with("config.json", is_matryoshka=1), "is_matryoshka is 1"),
    ],
)
def test_what_is_hostile_or_unknown_is_refused_by_name(
    folder: Path, harm: Callable[[Path], object], words: str
) -> None:
    harm(folder)
    with pytest.raises(BadCheckpoint) as error:
        pooling(folder)
    assert words in str(error.value), error.value


@pytest.mark.parametrize(
    "said",
    [7, "last", [], {}, {"mode": "max"}, {"mode": 3}, {"mode": "last", "normalize": 1}],
)
def test_the_field_of_a_config_is_not_believed(tmp_path: Path, said: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, KEY: said}))
    with pytest.raises(BadCheckpoint, match=KEY):
        pooling(tmp_path)


def test_a_pack_has_no_head_and_says_how_it_pools(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", "mean", {"matryoshka_dimensions": [16, 64]})
    with closing(Checkpoint(folder)) as checkpoint:
        assert "model.embed_tokens.weight" in checkpoint.parts
        assert "model.norm.weight" in checkpoint.names
        assert "config.json" in checkpoint.small_files
    pack = Pack.open(convert_checkpoint(folder, tmp_path / "pack", experts="int8", dense="int8"))
    model = build(pack.config)
    wanted = TextPooling(PoolingMode.MEAN, True, True, lengths=(16, 64))
    assert model.pooling == wanted and model.spec.output_width == HIDDEN
    assert "lm_head" not in {tensor.name for tensor in model.tensors}
    assert build(read_config(pack.path)).pooling == wanted  # as `kt show` of a pack reads it


def test_a_head_that_is_there_is_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_embedder(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = {f"model.{name}": each for name, each in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    pack = convert_checkpoint(folder, tmp_path / "pack", experts="int8", dense="int8")
    assert "lm_head" not in {tensor.name for tensor in build(Pack.open(pack).config).tensors}
