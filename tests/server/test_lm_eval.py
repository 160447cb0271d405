"""lm-eval's `local-completions`, by its published package, on a small random model: its log-likelihoods are those of
transformers, with kt's exact activations and cache. Those that round to bf16 are off by a few thousandths.

The harness is none of kt's requirements. KT_TEST_LM_EVAL names the Python of an environment that has it:

    python -m venv FOLDER && FOLDER/bin/pip install 'lm-eval[api]' transformers
    KT_TEST_LM_EVAL=FOLDER/bin/python pytest tests/server/test_lm_eval.py
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat.fake_engine import END, write_tokenizer
from convert import convert_checkpoint
from server.running import Running, serving_models

from ktcli.assembly.ready import Ready
from ktcli.assembly.request import DeviceWords, Wanted
from ktcli.assembly.talking import Opening
from ktcli.hardware.gpu import CPU
from ktcli.server.models.source import FOREVER, ModelSource

pytestmark = pytest.mark.thorough

NAME, CONTEXT = "tiny", 512
DOCUMENTS = [
    {"question": "this is the question", "choices": [" the answer", " hello world", "!"], "answer": 0},
    {"question": "hello world, this", "choices": [" is", " is the answer to that question"], "answer": 1},
    {"question": "Ünïcode: 日本", "choices": [" 語", "e", " 👍 and so on"], "answer": 2},
    {"question": "a" * 90 + "\n\n", "choices": ["b", "  c\n"], "answer": 0},
]  # fmt: skip
CHOICES = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
ROLLING = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: word_perplexity
"""
TASKS = {"choices": CHOICES, "rolling": ROLLING}


@pytest.fixture(scope="module")
def harness() -> str:
    python = os.environ.get("KT_TEST_LM_EVAL", "")
    if not python:
        pytest.skip("KT_TEST_LM_EVAL does not name a Python with lm-eval: see this file")
    return python


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=80,
        intermediate_size=72,
        num_attention_heads=4,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,  # else all tokens are almost equally likely
    )
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    path.write_text(json.dumps({**json.loads(path.read_text()), **plain}))
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    out = tmp_path_factory.mktemp("pack") / "pack"
    pack = convert_checkpoint(checkpoint, out, experts="f32", dense="f32")
    wanted = Wanted(CONTEXT, 2, exact=True, streams=4, device=DeviceWords(device=CPU))
    own = ModelSource(Ready(NAME, pack), NAME, Opening(wanted, 0, False), FOREVER)
    with serving_models([own]) as running:
        yield running


@pytest.fixture(scope="module")
def samples(
    harness: str, server: Running, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The samples of each task as the harness saves them, of one run of it: it takes a while to begin."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task.format(name=name, data=data))
    address = f"{server.url}/v1/completions"
    model = f"model={NAME},base_url={address},tokenizer={checkpoint},num_concurrent=4"
    command = [
        harness, "-m", "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", ",".join(TASKS),
        "--batch_size", "3", "--include_path", str(folder), "--log_samples", "--output_path", str(folder / "out"),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**environ, **offline}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in TASKS:
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(each) for each in path.read_text().splitlines()]
        assert len(found[name]) == len(DOCUMENTS)
    return found


class Judge:
    """transformers' model and tokenizer of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
        self.first: int = tokenizer.bos_token_id

    def of(self, context: Sequence[int], more: Sequence[int]) -> tuple[float, bool]:
        """The log-likelihood of ids behind others, and whether each is the likeliest."""
        torch = self._torch
        ids = torch.tensor([[*context, *more]])
        with torch.no_grad():
            chances = self._model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        wanted = ids[0, len(context) :]
        sum_of = float(chances.gather(1, wanted[:, None]).sum())
        return sum_of, bool((chances.argmax(-1) == wanted).all())


def test_log_likelihoods_are_those_of_transformers(
    samples: dict[str, list[dict[str, Any]]], checkpoint: Path
) -> None:
    judge = Judge(checkpoint)
    for sample in samples["choices"]:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        for choice, response in zip(choices, sample["filtered_resps"], strict=True):
            # A blank at the end of the context belongs to the continuation.
            context = question.rstrip()
            whole, before = judge.ids(question + choice), judge.ids(context)
            expected, greedy = judge.of(before, whole[len(before) :])
            assert float(response[0]) == pytest.approx(expected, abs=1e-3)
            assert str(response[1]) == str(greedy)


def test_the_likelihood_of_a_whole_text_is_that_of_transformers(
    samples: dict[str, list[dict[str, Any]]], checkpoint: Path
) -> None:
    judge = Judge(checkpoint)
    for sample in samples["rolling"]:
        expected, _ = judge.of([judge.first], judge.ids(sample["doc"]["question"]))
        assert float(sample["filtered_resps"][0]) == pytest.approx(expected, abs=1e-3)
