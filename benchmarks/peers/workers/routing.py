"""Which experts an engine built on ggml chooses for random ids, so that the results can say so.

Such an engine shows every tensor it computes to a callback of its scheduler; the router's logits are
looked at here, once after loading, on a context of its own. Only functions of ggml are called; how it
lays out a tensor is not assumed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

TOKENS = 256
_WINDOW = 16  # neighbours whose experts are counted together: few enough that not all are reached
_LOGITS = b"ffn_moe_logits-"


class Routing:
    """Counts the experts with the highest logits.

    Attributes:
        callback: for `cb_eval` of the context's parameters.
    """

    def __init__(self, ggml: ctypes.CDLL, callback_type: Any, top_k: int) -> None:
        self._ggml, self._top_k = ggml, top_k
        self._seen: list[float] = []
        self._experts = 0
        self.callback = callback_type(self._look)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        ggml.ggml_get_name.argtypes, ggml.ggml_get_name.restype = [pointer], ctypes.c_char_p
        for name in ("ggml_nrows", "ggml_nelements"):
            function = getattr(ggml, name)
            function.argtypes, function.restype = [pointer], ctypes.c_int64
        ggml.ggml_backend_tensor_get.argtypes = [pointer, pointer, size, size]

    def about(self) -> dict[str, Any]:
        """As kt's worker says it; empty if the engine showed no such tensor."""
        if not self._seen:
            return {}
        even = 1 - (1 - self._top_k / self._experts) ** _WINDOW
        return {
            f"experts_of_{_WINDOW}_tokens_percent": 100 * float(np.mean(self._seen)),
            f"experts_of_{_WINDOW}_tokens_percent_if_even": 100 * even,
        }

    def _look(self, tensor: int, ask: bool, _: Any) -> bool:
        """Asked before a tensor is computed whether it is wanted, then called with its values."""
        wanted = self._ggml.ggml_get_name(tensor).startswith(_LOGITS)
        if ask:
            return bool(wanted)
        tokens = self._ggml.ggml_nrows(tensor)
        if wanted and tokens == TOKENS:  # the last layer is computed for the last token only
            self._experts = self._ggml.ggml_nelements(tensor) // tokens
            logits = np.empty((tokens, self._experts), dtype=np.float32)
            self._ggml.ggml_backend_tensor_get(tensor, logits.ctypes.data, 0, logits.nbytes)
            best = np.argpartition(logits, -self._top_k, axis=1)[:, -self._top_k :]
            windows = best.reshape(-1, _WINDOW * self._top_k)
            self._seen += [np.unique(window).size / self._experts for window in windows]
        return True
