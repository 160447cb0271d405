"""`download_bytes` of the catalogue: the tensors of all safetensors files of the repository, counted from the config.

That is more than the model: layers that predict further tokens are downloaded with it, and so is a head that lies
beside the embedding it is tied to. The headers of the files and the small files, a thousandth at most, are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import pytest
from declared import declared

from ktcli.models import Model, build
from ktcli.store import catalog

PUBLISHED = [name for name in catalog.names() if not catalog.get(name).builtin]
BF16 = 2.0
FP8 = 1 + 4 / (128 * 128)  # and an f32 scale for each block
F32 = 4.0
FP8_E8M0 = 1 + 1 / (128 * 128)
MXFP4 = (4 + 8 / 32) / 8  # and an e8m0 scale for 32
INT4_G32 = (4 + 16 / 32) / 8  # and a bf16 scale for 32

# Published as the sum over the files, or as parameters of two bytes (safetensors metadata of the hub).
KNOWN = {
    "qwen3-0.6b": 1_503_264_768,  # its head lies beside the embedding it is tied to
    "qwen3-4b": 8_044_936_192,
    "qwen3-30b-a3b": 61_064_245_248,
    "qwen3-next-80b-a3b": 2 * 81_324_862_720,
    "glm-4.5": 2 * 358_337_791_296,
    "glm-4.5-air": 2 * 110_468_824_832,
    "glm-4.6": 2 * 356_785_898_816,  # the layer ahead has no embedding and head of its own
    "glm-5.1": 2 * 753_864_139_008,  # and this one of GLM-5 has none either
    "minimax-m2.7": 230_123_600_000,  # all tensors, their sum in GiB with two digits
    "minimax-m3": 854_172_958_720,
    "deepseek-v3": 688_586_727_753,  # files, headers included
    "deepseek-v4-flash": 159_609_485_896,
}


def pieces(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the main model in its checkpoint; of one that stands for all experts, theirs together."""
    counts = declared(model)
    shapes = {p.name: p.shape for t in model.tensors for way in t.sources for p in way}
    return {
        name: (n // prod(shapes[name]), *shapes[name]) if "{e}" in name else shapes[name]
        for name, n in counts.items()
    }


def is_projection(name: str, shape: tuple[int, ...]) -> bool:
    """Whether schemes of fewer bits than 16 are about it: not embedding, head and router."""
    plain = (
        "embed",
        "lm_head",
        "head.weight",
        "gate.weight",
        "router",
        "conv1d",
        "weights_proj",
        "bias",
    )
    return len(shape) > 1 and not any(word in name for word in plain)


def element_bytes_of_v4(name: str, shape: tuple[int, ...]) -> float:
    """As DeepSeek-V4 publishes it: experts in FP4, some vectors in f32, ids of experts in 64 bits."""
    if "tid2eid" in name:
        return 8
    if any(word in name for word in ("hc_", "ape", "gate.bias", "attn_sink")):
        return 4
    if "compressor" in name or not is_projection(name, shape):
        return BF16
    return MXFP4 if "{e}" in name else FP8_E8M0


def element_bytes(config: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], float]:
    """Bytes of an element by name and shape of its tensor, scales included."""
    if config["model_type"] == "deepseek_v4":
        return element_bytes_of_v4
    kind = config["model_type"]
    scheme = config.get(
        "quantization_config", config.get("text_config", {}).get("quantization_config")
    )
    method = (scheme or {}).get("quant_method")

    def of(name: str, shape: tuple[int, ...]) -> float:
        if kind == "minimax_m3_vl" and name.endswith(".gate.weight"):
            return F32
        if not is_projection(name, shape):
            return BF16
        if "{e}" in name or ".experts." in name:
            return {"mxfp4": MXFP4, "compressed-tensors": INT4_G32, "fp8": FP8}.get(method, BF16)
        kept = method == "fp8" and config["model_type"] == "mimo_v2_flash" and "o_proj" in name
        return FP8 if method == "fp8" and not kept else BF16

    return of


def ahead(name: str, config: Mapping[str, Any], model: Model) -> Iterator[float]:
    """Bytes of what predicts further tokens, part by part."""
    per, text = element_bytes(config), config.get("text_config", config)
    hidden = text["hidden_size"]
    table = 2 * text["vocab_size"] * hidden * BF16  # an embedding and a head
    layers = config.get("num_nextn_predict_layers", 0)
    last = f"layers.{text['num_hidden_layers'] - 1}."
    whole = sum(prod(s) * per(n, s) for n, s in pieces(model).items() if last in n)
    match config["model_type"]:
        case "deepseek_v3" | "deepseek_v32" | "glm4_moe" | "glm4_moe_lite" | "glm_moe_dsa" if (
            layers
        ):
            yield whole + (2 * hidden + 3) * hidden * BF16
            yield 0 if name in WITHOUT_TABLES else table
        case "qwen3_next" | "qwen3_5" | "qwen3_5_moe" if name != "qwen3-coder-next":
            yield whole + (2 * hidden + 3) * hidden * BF16
        case "nemotron_h" if layers:  # its layers are two, which are one part each
            kinds = config["mtp_hybrid_override_pattern"]
            more = build({**config, "hybrid_override_pattern": kinds, "num_hidden_layers": 2})
            fresh = {n: s for n, s in pieces(more).items() if ".layers." in n}
            yield sum(prod(s) * per(n, s) for n, s in fresh.items())
            yield (2 * hidden + 3) * hidden * BF16
        case "deepseek_v4":  # a layer of the window alone
            more = build({**config, "num_hidden_layers": config["num_hidden_layers"] + 1})
            known = pieces(model)
            fresh = {n: s for n, s in pieces(more).items() if n not in known}
            yield sum(prod(s) * per(n, s) for n, s in fresh.items())
            yield 2 * hidden * hidden * FP8_E8M0 + 3 * hidden * BF16  # the way in
            streams = config["hc_mult"]
            yield 4 * (streams * streams * hidden + streams + 1)  # and out of the residual streams
        case "ernie4_5_moe":  # a dense layer
            heads = config["num_attention_heads"] + config["num_key_value_heads"]
            attention = 2 * heads * hidden // config["num_attention_heads"]
            yield (attention + 3 * config["intermediate_size"] + 2 * hidden + 4) * hidden * BF16
        case "mimo_v2_flash":  # three dense layers with a window
            heads, kv = config["swa_num_attention_heads"], config["swa_num_key_value_heads"]
            q, v = config["swa_head_dim"], config["swa_v_head_dim"]
            coded = (heads + kv) * q + kv * v + 3 * config["intermediate_size"]
            yield 3 * hidden * (coded * FP8 + (heads * v + 2 * hidden + 5) * BF16)


def seeing(config: Mapping[str, Any]) -> int:
    """Elements of what sees pictures and videos: its layers, and the way from it into the text model."""
    vision, hidden = (
        config.get("vision_config", {}),
        config.get("text_config", {}).get("hidden_size"),
    )
    width, inner = vision.get("hidden_size", 0), vision.get("intermediate_size", 0)
    layer = 4 * width * (width + 1) + width * (2 * inner + 1) + inner + 4 * width
    match config["model_type"]:
        case "qwen3_5" | "qwen3_5_moe":
            patch, positions = 3 * 2 * 16 * 16 * width + width, vision["num_position_embeddings"]
            merged = 4 * width
            way = 2 * width + merged * (merged + 1) + (merged + 1) * hidden
            return vision["depth"] * layer + patch + positions * width + way
        case "minimax_m3_vl":
            patch, norm = 3 * 2 * 14 * 14 * width, 2 * width
            way = hidden * (width + hidden + 2) + hidden * (4 * hidden + hidden + 2)
            return vision["num_hidden_layers"] * layer + 2 * patch + norm + way  # patches in f32
    return 0


WITHOUT_TABLES = ("glm-4.6", "glm-5", "glm-5.1", "glm-5.2")


def downloaded(name: str) -> float:
    config = catalog.get(name).config
    model = build(config)
    per = element_bytes(config)
    main = sum(prod(shape) * per(n, shape) for n, shape in pieces(model).items())
    head = config["vocab_size"] * config["hidden_size"] * BF16 if name == "qwen3-0.6b" else 0
    return main + head + sum(ahead(name, config, model)) + seeing(config) * BF16


@pytest.mark.in_turn("name")
@pytest.mark.parametrize("name", PUBLISHED)
def test_downloads_are_counted_by_one_rule(name: str) -> None:
    assert catalog.get(name).download_bytes == pytest.approx(downloaded(name), rel=1e-5)


@pytest.mark.parametrize("name", KNOWN)
def test_downloads_are_those_that_were_published(name: str) -> None:
    assert catalog.get(name).download_bytes == pytest.approx(KNOWN[name], rel=1e-3)


def test_models_of_one_shape_and_one_scheme_are_one_download() -> None:
    """Of several makers' releases of the same weights' layout only some of GLM leave tables out."""
    sizes = {name: catalog.get(name).download_bytes for name in PUBLISHED}
    assert sizes["deepseek-r1"] == sizes["deepseek-v3"]
    assert sizes["kimi-k2.6"] == sizes["kimi-k2.5"] == sizes["kimi-k2-thinking"]
    assert sizes["minimax-m2.7"] == sizes["minimax-m2.5"] == sizes["minimax-m2"]
    assert sizes["qwen3.6-35b-a3b"] == sizes["qwen3.5-35b-a3b"]
    assert sizes["qwen3-coder-30b-a3b"] == sizes["qwen3-30b-a3b"] == sizes["qwen3-30b-a3b-2507"]
