"""llama.cpp through the C functions of llama-cpp-python; the same file serves every build of it."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.peers.workers.serve import serve


class Llama:
    """A model file and one context on it.

    Weights are read into memory, not mapped: huge pages then work for it as they do for kt, and its
    own repacking (on by default) finds them. Prompts go in pieces of 512 tokens, the default, as kt's.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        model = lib.llama_model_load_from_file(spec["file"].encode(), model_params)
        if not model:
            raise RuntimeError("the model file was refused")
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = spec["context"]
        params.n_threads = params.n_threads_batch = spec["threads"]
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context for this model")
        self._memory = lib.llama_get_memory(self._context)
        self.vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.about: dict[str, Any] = {
            "version": lib.__version__,
            "threads": lib.llama_n_threads(self._context),
            "weights_bytes": lib.llama_model_size(model),
            "tokens_at_once": lib.llama_n_ubatch(self._context),
            "features": lib.llama_print_system_info().decode(),
        }

    def prefill(self, ids: list[int]) -> None:
        lib.llama_memory_clear(self._memory, False)
        self._feed(ids)

    def decode(self, ids: list[int]) -> None:
        lib.llama_memory_clear(self._memory, False)
        for token in ids:
            int(self._feed([token]).argmax())

    def _feed(self, ids: list[int]) -> np.ndarray[Any, Any]:
        """Append ids; the logits of the last."""
        array = (lib.llama_token * len(ids))(*ids)
        status = lib.llama_decode(self._context, lib.llama_batch_get_one(array, len(ids)))
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
        )


if __name__ == "__main__":
    serve(Llama)
