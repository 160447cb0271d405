"""llama.cpp through the C functions of llama-cpp-python; the same file serves every build of it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.peers.workers.routing import TOKENS, Routing
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
        params.n_seq_max = spec["streams"]
        params.n_ctx = spec["context"] * spec["streams"]  # of all sequences
        self._batch = lib.llama_batch_init(spec["streams"], 0, 1)
        self.vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        routing = self._routing(model, params, spec["top_k"])
        self._open(model, params)
        self.about: dict[str, Any] = {
            "version": lib.__version__,
            "threads": lib.llama_n_threads(self._context),
            "weights_bytes": lib.llama_model_size(model),
            "tokens_at_once": lib.llama_n_ubatch(self._context),
            "features": lib.llama_print_system_info().decode(),
            **routing,
        }

    def _open(self, model: Any, params: Any) -> None:
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context for this model")
        self._memory = lib.llama_get_memory(self._context)

    def _routing(self, model: Any, params: Any, top_k: int) -> dict[str, Any]:
        """How evenly experts are chosen, on a context that is closed again."""
        ggml = ctypes.CDLL(str(Path(lib.__file__).with_name("lib") / "libggml-base.so"))
        routing = Routing(ggml, lib.ggml_backend_sched_eval_callback, top_k)
        watched = type(params).from_buffer_copy(params)
        watched.cb_eval = routing.callback
        self._open(model, watched)
        self._feed(np.random.default_rng(1).integers(0, self.vocab, TOKENS).tolist())
        lib.llama_free(self._context)
        return routing.about()

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
        return self._logits(-1)

    def decode_streams(self, ids: list[list[int]]) -> None:
        lib.llama_memory_clear(self._memory, False)
        batch = self._batch
        for position, row in enumerate(ids):
            batch.n_tokens = len(row)
            for i, token in enumerate(row):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
            status = lib.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            for i in range(len(row)):
                int(self._logits(i).argmax())

    def _logits(self, of: int) -> np.ndarray[Any, Any]:
        """The logits of an id of the last batch; -1: of its last."""
        logits = lib.llama_get_logits_ith(self._context, of)
        return np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,)
        )


if __name__ == "__main__":
    serve(Llama)
