"""gpt-oss (20b, 120b): grouped-query attention with sinks, a window in every second layer, experts with biases.

The router has a bias on its logits and weights the chosen experts by the softmax over them alone, which is the
softmax over all, normalised. Published weights of experts are MXFP4: blocks of 32 with a power of two.
Source: the gpt-oss model card (arXiv 2508.10925); transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace

from ktcli.layers.names import EachExpert, InterleavedExperts, RouterNames, SparseNames
from ktcli.layers.sparse import SparseMlp
from ktcli.models.attention import read_gqa
from ktcli.models.config import Defaults, Fields
from ktcli.models.feedforward import read_clamped, read_routing
from ktcli.models.model import Model
from ktcli.models.pattern import cut_layers, read_windows
from ktcli.models.skeleton import assemble

_NAMES = SparseNames(
    (InterleavedExperts(), EachExpert()), RouterNames("router.weight", "router.bias")
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MODEL_TYPES: Defaults = {
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rope_theta": 150_000.0,
        "rope_parameters": _ROPE,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
}

cut = cut_layers


def build(f: Fields) -> Model:
    """Returns the model that the `config.json` fields `f` describe: its layers and the tensors they need, without
    weights.
    """
    attention = replace(read_gqa(f, biased=True), sinks_name="sinks")
    window = read_windows(f, default=lambda i: i % 2 == 0)
    sparse = SparseMlp(
        f.whole("hidden_size"),
        f.whole("intermediate_size"),
        read_routing(f, normalize=True),
        names=_NAMES,
        glu=read_clamped(f, shifted=True),
        biases=True,
    )

    return assemble(f, "gpt_oss", lambda i: (attention.within(window(i)), sparse))
