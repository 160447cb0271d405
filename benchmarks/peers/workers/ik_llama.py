"""ik_llama.cpp through the C functions of ik-llama-cpp-python, with run-time repacking."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

_FOUND = importlib.util.find_spec("ik_llama_cpp")
assert _FOUND and _FOUND.origin
GGML = ctypes.CDLL(
    str(Path(_FOUND.origin).with_name("lib") / "libggml.so"), mode=ctypes.RTLD_GLOBAL
)  # its libllama does not say where this lies

from ik_llama_cpp import _ctypes_api as lib  # noqa: E402

from benchmarks.peers.workers.routing import TOKENS, Routing  # noqa: E402
from benchmarks.peers.workers.serve import serve  # noqa: E402

# ik_llama_cpp's classes offer no repacking, so the C functions below them are called.


class IkLlama:
    """A model file and one context on it: weights repacked at loading, flash attention on."""

    def __init__(self, spec: dict[str, Any]) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.use_mmap = False  # repacking needs memory of its own
        model_params.repack_tensors = True
        model = lib.llama_model_load_from_file(spec["file"].encode(), model_params)
        if not model:
            raise RuntimeError("the model file was refused")
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = spec["context"]
        params.n_threads = params.n_threads_batch = spec["threads"]
        params.flash_attn = True
        params.n_seq_max = spec["streams"]
        params.n_ctx = spec["context"] * spec["streams"]  # of all sequences
        self._batch = lib.llama_batch_init(spec["context"], 0, 1)
        self.vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        routing = self._routing(model, params, spec["top_k"])
        self._open(model, params)
        self.about: dict[str, Any] = {
            "version": spec["version"],
            "threads": spec["threads"],
            "tokens_at_once": lib.llama_n_ubatch(self._context),
            "repacked": True,
            **routing,
        }

    def _open(self, model: Any, params: Any) -> None:
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context for this model")

    def _routing(self, model: Any, params: Any, top_k: int) -> dict[str, Any]:
        """How evenly experts are chosen, on a context that is closed again."""
        routing = Routing(GGML, lib.ggml_backend_sched_eval_callback, top_k)
        watched = type(params).from_buffer_copy(params)
        watched.cb_eval = routing.callback
        self._open(model, watched)
        self._feed(np.random.default_rng(1).integers(0, self.vocab, TOKENS).tolist(), 0)
        lib.llama_free(self._context)
        return routing.about()

    def prefill(self, ids: list[int]) -> None:
        lib.llama_kv_cache_clear(self._context)
        self._feed(ids, 0)

    def decode(self, ids: list[int]) -> None:
        lib.llama_kv_cache_clear(self._context)
        for position, token in enumerate(ids):
            int(self._feed([token], position).argmax())

    def decode_streams(self, ids: list[list[int]]) -> None:
        lib.llama_kv_cache_clear(self._context)
        batch = self._batch
        for position, row in enumerate(ids):
            batch.n_tokens = len(row)
            for i, token in enumerate(row):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
            self._run()
            for i in range(len(row)):
                int(self._logits(i).argmax())

    def _feed(self, ids: list[int], start: int) -> np.ndarray[Any, Any]:
        """Append ids at `start`; the logits of the last."""
        batch, n = self._batch, len(ids)
        batch.n_tokens = n
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, i == n - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        self._run()
        return self._logits(-1)

    def _run(self) -> None:
        status = lib.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _logits(self, of: int) -> np.ndarray[Any, Any]:
        """The logits of an id of the last batch; -1: of its last."""
        logits = lib.llama_get_logits_ith(self._context, of)
        return np.ctypeslib.as_array(logits, (self.vocab,))


if __name__ == "__main__":
    serve(IkLlama)
