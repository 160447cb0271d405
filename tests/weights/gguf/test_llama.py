"""llama.cpp is the judge: the same GGUF file gives the same logits and the same greedy continuation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from convert import convert_checkpoint
from gguf_families import ALL_CASES
from gguf_models import GgufCase, write_gguf
from gguf_vocabularies import VOCABULARIES
from llama_judge import Verdict, digest, judge, recorded, recorded_tokens, tokens
from loading import load_engine
from timelines import logits_of

from ktcli.engine import Engine

ALIKE = 0.999


@pytest.fixture(scope="module", params=ALL_CASES, ids=lambda case: case.name)
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GgufCase, Path, Engine]:
    """A file, and an engine on its bf16 conversion."""
    case: GgufCase = request.param
    folder = tmp_path_factory.mktemp(case.name)
    path = write_gguf(case, folder / f"{case.name}.gguf")
    pack = convert_checkpoint(path, folder / "pack", experts="bf16", dense="bf16")
    return case, path, load_engine(pack, exact=True, all_logits=True, threads=1)


def agrees(engine: Engine, verdict: Verdict) -> None:
    """Logits of the prompt correlate, and the same tokens follow."""
    n = len(verdict.logits)
    prompt, answer = verdict.ids[:n], verdict.ids[n:]
    session = engine.session()
    logits = logits_of(session, prompt)
    likeness = np.corrcoef(logits.ravel(), verdict.logits.astype(np.float32).ravel())[0, 1]
    assert likeness > ALIKE
    said = [int(logits[-1].argmax())]
    while len(said) < len(answer):
        said.append(int(logits_of(session, said[-1:])[-1].argmax()))
    assert said == answer


@pytest.mark.in_turn("converted")
def test_the_record(converted: tuple[GgufCase, Path, Engine]) -> None:
    case, path, engine = converted
    verdict = recorded()[case.name]
    assert digest(path) == verdict.sha256, "the file is not the one that was recorded"
    agrees(engine, verdict)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama_cpp")
def test_llama_cpp_itself(converted: tuple[GgufCase, Path, Engine]) -> None:
    case, path, engine = converted
    agrees(engine, judge(case, path))


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama_cpp")
@pytest.mark.parametrize("case", VOCABULARIES, ids=lambda case: case.name)
def test_the_record_of_tokens(case: GgufCase, tmp_path: Path) -> None:
    path = write_gguf(case, tmp_path / "vocabulary.gguf")
    assert tokens(path) == recorded_tokens(case.name)
