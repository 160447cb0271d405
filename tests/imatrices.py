"""Writes imatrix files in the layout of llama.cpp's `llama-imatrix`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Sums = Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


def write_imatrix(path: Path, sums: Sums, tokens: int = 512) -> Path:
    """A file of sums of squares [E, k] and counts [E] by the tensors' names; ggml leaves out last dimensions of 1."""
    writer = gguf.GGUFWriter(path, "none")
    del writer.kv_data[0]["general.architecture"]  # these files do not say it
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", tokens)
    for name, (squares, counts) in sums.items():
        one = len(counts) == 1
        shapes = ((squares.shape[1],), (1,)) if one else (squares.shape, (len(counts), 1))
        for end, values, shape in zip(
            ("in_sum2", "counts"), (squares, counts), shapes, strict=True
        ):
            writer.add_tensor(f"{name}.{end}", values.astype(np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
