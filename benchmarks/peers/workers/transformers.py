"""transformers on torch, bf16, experts by grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.peers.workers.serve import serve

_PIECE = 512  # tokens at once, as kt's


class Transformers:
    """A model built from its config, weights random, embeddings large as in kt's random engine."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        torch.manual_seed(1)
        values = dict(spec["config"])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
            )
        self._model = model.to_empty(device="cpu").eval()
        with torch.no_grad():
            for name, tensor in self._model.named_parameters():
                _fill(name, tensor)
            rotary = self._model.model.rotary_emb
            self._model.model.rotary_emb = type(rotary)(config=config)
        self.vocab = int(values["vocab_size"])
        self.about: dict[str, Any] = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "tokens_at_once": _PIECE,
            "experts_implementation": "grouped_mm",
        }

    def prefill(self, ids: list[int]) -> None:
        cache = DynamicCache(config=self._model.config)
        for start in range(0, len(ids), _PIECE):
            self._feed(ids[start : start + _PIECE], cache)

    def decode(self, ids: list[int]) -> None:
        cache = DynamicCache(config=self._model.config)
        for token in ids:
            int(self._feed([token], cache).argmax())

    @torch.inference_mode()
    def _feed(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        inputs = torch.tensor([ids])
        found = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = found.logits[0, -1]
        return logits


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Norms 1, matrices with rms 1/sqrt(inputs), embeddings 64 times what a layer adds."""
    if tensor.ndim == 1:
        tensor.fill_(1.0)
    elif "embed_tokens" in name:
        tensor.normal_(0.0, 64.0)
    elif tensor.ndim == 3:  # all experts of a layer: one is drawn, memory holds every copy apart
        tensor[0].normal_(0.0, tensor.shape[-1] ** -0.5)
        tensor[1:] = tensor[0]
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5)


if __name__ == "__main__":
    serve(Transformers)
