"""Architectures by their small models: what is wrong is a sentence, rearranged blocks are the same numbers, and layers
that guess further tokens are left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_cases import CASES
from gguf_families import FAMILIES, LAYERS
from gguf_models import GgufCase, write_gguf

from ktcli.errors import BadCheckpoint
from ktcli.models import build
from ktcli.native import Pool
from ktcli.weights.check import check
from ktcli.weights.gguf.file import Gguf
from ktcli.weights.reader import examine
from ktcli.weights.storage import ByteSpan

BY_NAME = {case.name: case for case in (*CASES, *FAMILIES)}


def changed(name: str, **metadata: Any) -> GgufCase:
    """A family's case with other metadata, "__" for a dot; None: without it."""
    given = {key.replace("__", "."): value for key, value in metadata.items()}
    both = {**BY_NAME[name].metadata, **given}
    return replace(BY_NAME[name], metadata={k: v for k, v in both.items() if v is not None})


def olmoe(**metadata: Any) -> GgufCase:
    """The tensors of OLMoE's case with metadata that disagree."""
    own = BY_NAME["olmoe"]
    return replace(changed("olmoe", **metadata), tensors=lambda case: own.tensors(own))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "Q4_1"])
@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_rearranged_blocks_are_the_same_numbers(name: str, kind: str, tmp_path: Path) -> None:
    """A file of blocks and one of what they mean, in F32, give the same tensors, however they are cut."""
    path = write_gguf(replace(BY_NAME[name], kind=kind), tmp_path / "coded.gguf")
    numbers = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    plain = replace(BY_NAME[name], kind="F32", tensors=lambda case: iter(numbers.items()))
    pool = Pool(1)
    with Gguf(path) as blocks, Gguf(write_gguf(plain, tmp_path / "plain.gguf")) as wide:
        for found in blocks.names:
            if "linear_attn" not in found:
                continue
            whole, parts = (decoded(pool, wide, found, 1 << 20), decoded(pool, blocks, found, 37))
            np.testing.assert_array_equal(whole, parts, err_msg=found)


def decoded(pool: Pool, reader: Gguf, name: str, step: int) -> np.ndarray:
    """All rows of a tensor, read some at a time."""
    source = reader.find(name)

    def rows() -> Iterator[np.ndarray]:
        for start in range(0, source.rows, step):
            span = ByteSpan(source, start, min(start + step, source.rows))
            raws = [reader.read(each) for each in source.storage.reads(span)]
            yield reader.decode(pool, span, raws)

    return np.concatenate(list(rows()))


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    own = BY_NAME["qwen3vlmoe"]
    metadata = {**own.metadata, "block_count": LAYERS + 1, "nextn_predict_layers": 1}
    extra = {
        f"blk.{LAYERS}.nextn.{of}.weight": (256, 256) for of in ("eh_proj", "shared_head_head")
    }

    def tensors(case: GgufCase) -> Iterator[Any]:
        yield from own.tensors(case)
        yield from extra.items()

    with Gguf(
        write_gguf(replace(own, metadata=metadata, tensors=tensors), tmp_path / "a.gguf")
    ) as read:
        assert read.config["num_hidden_layers"] == LAYERS
        check(build(read.config), read)


def test_a_file_that_speaks_of_such_layers_and_has_none_has_all_its_layers(tmp_path: Path) -> None:
    """As DeepSeek-V4's, whose converter counts only the others."""
    case = changed("deepseek4", nextn_predict_layers=1)
    with Gguf(write_gguf(case, tmp_path / "a.gguf")) as read:
        assert read.config["num_hidden_layers"] == LAYERS
        check(build(read.config), read)


BAD: dict[str, tuple[GgufCase, str]] = {
    "tensors of another architecture": (
        replace(BY_NAME["qwen3vl"], architecture="qwen3moe"),
        "qwen3moe.expert_count is missing",
    ),
    "experts that are none": (
        replace(changed("qwen3vlmoe", expert_count=3), architecture="qwen3moe"),
        "shape|does not mention",
    ),
    "experts where the architecture has none": (
        replace(BY_NAME["qwen3vlmoe"], architecture="qwen3"),
        r"has no tensor 'model.layers.0.mlp.gate_proj.weight'.*general.architecture 'qwen3' requires",
    ),
    "linear attention where the architecture has none": (
        replace(BY_NAME["qwen35"], architecture="qwen3"),
        r"qwen3.rope.dimension_count is 16, but kt supports only heads of 64 columns",
    ),
    "another number of layers": (olmoe(block_count=5), r"no tensor .*layers.4.*'olmoe' requires"),
    "layers that are not spoken of": (
        olmoe(block_count=2),
        r"'olmoe' does not mention: .*layers.2",
    ),
    "no layers": (olmoe(block_count=0), "block_count is 0, less nextn_predict_layers 0, outside 1"),
    "more experts": (
        olmoe(expert_count=5),
        r"mlp.gate.weight in .* has the shape \[4, 256\].* requires \[5, 256\]",
    ),
    "fewer experts": (
        olmoe(expert_count=3),
        r"mlp.gate.weight in .* has the shape \[4, 256\].* requires \[3, 256\]",
    ),
    "more experts used than there are": (
        olmoe(expert_used_count=9),
        "num_experts_per_tok is 9, but there are only 4 experts",
    ),
    "values of another width": (
        olmoe(attention__value_length=32),
        "olmoe.attention.value_length is 32, but kt supports only heads of 64 columns",
    ),
    "a list of too few": (
        olmoe(attention__head_count=[4]),
        "olmoe.attention.head_count has 1 values, olmoe.block_count is 4",
    ),
    "a list of too many": (
        olmoe(expert_used_count=[2] * 9),
        "olmoe.expert_used_count has 9 values, olmoe.block_count is 4",
    ),
    "a list of layers": (
        olmoe(block_count=[2, 4]),
        r"olmoe.block_count is \[2, 4\], not a whole number",
    ),
    "fewer heads": (olmoe(attention__head_count=2), "num_key_value_heads is 4, outside 1..2"),
    "more heads": (
        olmoe(attention__head_count=8),
        r"q_proj.weight in .* has the shape \[256, 256\]",
    ),
    "no window": (
        changed("gpt-oss-mxfp4", attention__sliding_window=None),
        "gpt-oss.attention.sliding_window is missing",
    ),
    "another width": (olmoe(embedding_length=128), r"has the shape \[300, 256\]"),
    "other widths of experts": (
        olmoe(feed_forward_length=128),
        r"experts.0.gate_proj.* has the shape",
    ),
    "no width": (
        changed("exaone-moe", embedding_length=None),
        "exaone-moe.embedding_length is miss",
    ),
    "no context": (
        changed("exaone-moe", context_length=None),
        "exaone-moe.context_length is missing",
    ),
    "another score": (
        changed("hunyuan-moe", expert_gating_func=2),
        r"expert_gating_func is 2; kt supports only softmax \(1\)",
    ),
    "a short list": (
        changed("deepseek4", attention__compress_ratios=[0, 4]),
        "compress_ratios is not a list of 4",
    ),
    "a list of numbers": (
        changed("exaone-moe", attention__sliding_window_pattern=[1, 1, 1, 0]),
        "sliding_window_pattern is not a list of bool",
    ),
    "heads that differ within a kind": (
        changed("step35", attention__head_count=[2, 4, 2, 4]),
        "attention.head_count differs",
    ),
    "kv heads that differ within a kind": (
        changed("mimo2", attention__head_count_kv=[2, 4, 2, 2]),
        "mimo2.attention.head_count_kv differs between layers of one kind",
    ),
    "a list of other numbers than 0 and 1": (
        changed("mimo2", attention__sliding_window_pattern=[0, 1, 2, 0]),
        "pattern has values other than 0 and 1",
    ),
    "a rotation where there is none": (
        changed("glm5-next", rope__dimension_count=32),
        "qk_rope_head_dim 32",
    ),
    "a choice that nobody made": (
        changed("glm5-next", attention__indexer__types=[1, 0, 0, 1, 1, 1]),
        "layer 1 shares what an indexer chose",
    ),
    "other streams": (
        changed("glm5-next", hyper_connection__count=3),
        r"hc_attn_fn in .* has the shape \[24, 1024\]",
    ),
    "values without a scale": (
        changed("mimo2", attention__value_scale=None),
        "mimo2.attention.value_scale is missing",
    ),
    "one number of heads": (changed("laguna", attention__head_count=4), "head_count is not a list"),
    "only layers that guess": (
        changed("qwen35", nextn_predict_layers=4),
        "block_count is 4, less nextn_predict_layers 4",
    ),
    "heads that are no multiple": (changed("qwen35", ssm__group_count=3), "linear_num_value_heads"),
    "no key heads": (changed("qwen35", ssm__group_count=0), "linear_num_key_heads"),
    "wide heads": (changed("qwen35", ssm__state_size=1 << 20), "linear_key_head_dim"),
    "no width of heads": (changed("qwen35", ssm__inner_size=0), "linear_value_head_dim"),
    "states where there are none": (
        replace(BY_NAME["qwen3vl"], architecture="nemotron_h"),
        "nemotron_h.ssm.time_step_rank is missing",
    ),
    "a list of heads that is short": (
        changed("nemotron_h", attention__head_count_kv=[0, 2]),
        "head_count_kv is not a list of 4 layers",
    ),
    "other rows of states": (changed("granitehybrid", ssm__state_size=32), "has the shape"),
    "queries that grow by another length": (
        changed("mistral4", attention__temperature_length=16),
        "mistral4.attention.temperature_length is 16, but kt supports only that of .*, 8",
    ),
    "Mistral's queries beside sigmoid": (
        changed("deepseek2-mistral", expert_gating_func=2),
        r"expert_gating_func is 2; kt supports only softmax \(1\)",
    ),
    "Llama 4 without chunks": (
        changed("llama4", attention__sliding_window=0),
        "llama4.attention.sliding_window is 0, but kt supports Llama 4 only with attention in chunks",
    ),
    "positions of pictures": (
        changed("bailingmoe3", rope__dimension_sections=[8, 4, 4, 0]),
        "bailingmoe3.rope.dimension_sections belongs to Ling 3's vision models",
    ),
    "decays without a bound": (
        changed("bailingmoe3", kda__gate_lower_bound=0.0),
        "kda_lower_bound is 0.0, outside",
    ),
    "convolutions in no layer that is named": (
        changed("lfm2moe", attention__head_count_kv=2),
        "lfm2moe.attention.head_count_kv is not a list of 4 layers",
    ),
    "rotations of other layers than there are": (
        changed("granite_swa", attention__rope_pattern=[True, True]),
        "granite_swa.attention.rope_pattern has 2 values",
    ),
    "convolutions beside windows": (
        changed("lfm2", attention__sliding_window=8),
        "lfm2.attention.sliding_window is set",
    ),
    "convolutions of another length": (changed("lfm2moe", shortconv__l_cache=4), "has the shape"),
    "no epsilon of norms": (
        changed(
            "cohere2moe",
            attention__layer_norm_rms_epsilon=None,
            attention__layer_norm_epsilon=None,
        ),
        "cohere2moe.attention.layer_norm_epsilon is missing",
    ),
    "other widths of heads": (changed("qwen35", ssm__state_size=32), "has the shape"),
}


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str, tmp_path: Path) -> None:
    case, said = BAD[name]
    with pytest.raises(BadCheckpoint, match=said):
        examine(write_gguf(case, tmp_path / "bad.gguf"))


@pytest.mark.in_turn("case")
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_nothing_but_sentences(case: GgufCase, tmp_path: Path) -> None:
    """A file with bytes changed anywhere in its header is read or refused."""
    one = replace(case, tensors=lambda case: iter([("token_embd.weight", (8, 32))]))
    raw = write_gguf(one, tmp_path / "small.gguf").read_bytes()
    rng, path = np.random.default_rng(0), tmp_path / "mutated.gguf"
    for at in rng.integers(24, len(raw) - 8 * 32 * 4, 60):
        other = bytearray(raw)
        other[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        path.write_bytes(bytes(other))
        with pytest.raises(BadCheckpoint):
            examine(path)
