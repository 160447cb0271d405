"""What llama.cpp says of the models in `gguf_cases` and the tokenizers in `gguf_vocabularies`, and the record
of it in data/gguf_llama.npz.

Compiling llama.cpp takes minutes, so the suite compares kt with the record; where llama_cpp can be imported,
with llama.cpp itself as well. To record again what is named (tokens: the tokenizers; nothing named: everything), with a
Python that has llama-cpp-python (0.3.36) and gguf, in the root of the repository:

    PYTHONPATH=.:tests python tests/llama_judge.py [NAME ...]
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from gguf_families import ALL_CASES
from gguf_models import GgufCase, write_gguf
from gguf_vocabularies import TEXTS, VOCABULARIES
from numpy.typing import NDArray

RECORD = Path(__file__).parent / "data" / "gguf_llama.npz"
PROMPT, ANSWER = 16, 24  # tokens


@dataclass(frozen=True)
class Verdict:
    """What llama.cpp says of one file.

    Attributes:
        sha256: of the file.
        ids: the prompt, and what follows when the best token is taken each time.
        logits: [PROMPT, vocab] f16, of the prompt's positions.
        gap: the smallest lead of a taken token over the next, in standard deviations of the logits; not recorded.
    """

    sha256: str
    ids: list[int]
    logits: NDArray[np.float16]
    gap: float = 0.0


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prompt(case: GgufCase, vocab: int) -> list[int]:
    raw = hashlib.shake_256(f"prompt of {case.name}".encode()).digest(4 * PROMPT)
    return [int(word) % vocab for word in np.frombuffer(raw, "<u4")]


def judge(case: GgufCase, path: Path) -> Verdict:
    """Ask llama.cpp."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=128,
        logits_all=True,
        n_threads=1,
        n_threads_batch=1,
        n_gpu_layers=0,
        verbose=False,
    )
    ids = list(case.prompt) or prompt(case, model.n_vocab())
    model.eval(ids)
    logits = np.array(model.scores[: len(ids)], dtype=np.float32)
    last, gaps = logits[-1], []
    for _ in range(ANSWER):
        best = np.sort(last)[-2:]
        gaps.append(float((best[1] - best[0]) / last.std()))
        ids.append(int(last.argmax()))
        model.eval(ids[-1:])
        last = np.array(model.scores[model.n_tokens - 1])
    model.close()
    return Verdict(digest(path), ids, logits.astype(np.float16), min(gaps))


def tokens(path: Path) -> list[list[int]]:
    """What llama.cpp makes of each text in TEXTS."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]


def recorded_tokens(name: str) -> list[list[int]]:
    """The same, as it was recorded."""
    at = [case.name for case in VOCABULARIES].index(name) * len(TEXTS)
    return _recorded_texts()[at : at + len(TEXTS)]


@cache
def _recorded_texts() -> list[list[int]]:
    """The tokens of each text by the first vocabulary, then by the next."""
    with np.load(RECORD) as file:
        flat = file["tokens"]
    ends = np.flatnonzero(flat == _END)
    return [part[part != _END].tolist() for part in np.split(flat, ends + 1)[:-1]]


_END = -1  # after the tokens of each text


def recorded() -> dict[str, Verdict]:
    """By name of the case."""
    with np.load(RECORD) as file:
        return {
            name: Verdict(
                str(file[f"{name}/sha256"]),
                file[f"{name}/ids"].tolist(),
                file[f"{name}/logits"],
            )
            for name in sorted({key.partition("/")[0] for key in file.files} - {"tokens"})
        }


def record(names: list[str]) -> None:
    found: dict[str, NDArray[np.generic]] = dict(np.load(RECORD)) if names else {}
    with tempfile.TemporaryDirectory() as folder:
        for case in ALL_CASES:
            if names and case.name not in names:
                continue
            verdict = judge(case, write_gguf(case, Path(folder) / f"{case.name}.gguf"))
            found[f"{case.name}/sha256"] = np.array(verdict.sha256)
            found[f"{case.name}/ids"] = np.array(verdict.ids, np.int16)
            found[f"{case.name}/logits"] = verdict.logits
            print(f"{case.name}: smallest lead {verdict.gap:.3f}", file=sys.stderr)
        if not names or "tokens" in names:
            files = (write_gguf(case, Path(folder) / "vocabulary.gguf") for case in VOCABULARIES)
            flat = [id for file in files for row in tokens(file) for id in (*row, _END)]
            found["tokens"] = np.array(flat, np.int16)
    np.savez_compressed(RECORD, **found)  # type: ignore[arg-type]


if __name__ == "__main__":
    record(sys.argv[1:])
