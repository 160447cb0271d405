"""Settings: keys of LLaMA-Factory are honoured, ignored aloud or refused by name, wrong values in one sentence."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ktcli.errors import KtError, UsageError
from ktcli.finetune.document import MAX_BYTES, read_document
from ktcli.finetune.settings import FinetuneSettings, read_given

# The groups of keys of LLaMA-Factory's examples with KTransformers, in its order and spelling.
EXAMPLE = """\
### model
model_name_or_path: Qwen/Qwen3-30B-A3B
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all

### dataset
dataset: identity, alpaca_en_demo
template: qwen3
cutoff_len: 1024
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/kt
logging_steps: 10
save_steps: 200
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.05
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null

### ktransformers
use_kt: true
kt_weight_path: /somewhere/experts
kt_cpu_activation: recompute
kt_config:
  kt_backend: AMXBF16
  kt_num_threads: 32
"""


def given(**values: Any) -> FinetuneSettings:
    return read_given([("train.yaml", values)]).settings


def test_an_example_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(EXAMPLE)
    found = read_given([("train.yaml", read_document(path))])
    s = found.settings
    assert (s.model_name_or_path, s.dataset) == (
        "Qwen/Qwen3-30B-A3B",
        ("identity", "alpaca_en_demo"),
    )
    assert (s.lora_rank, s.alpha, s.lora_target) == (16, 32.0, ("all",))
    assert (s.learning_rate, s.num_train_epochs, s.warmup_ratio) == (1e-4, 2.0, 0.05)
    assert (s.documents, s.save_steps, s.logging_steps) == (4, 200, 10)
    assert (s.resume_from_checkpoint, s.report_to, s.retains) == (False, ("none",), False)
    said = " ".join(found.ignored)
    for key in ("trust_remote_code", "template", "bf16", "use_kt", "kt_weight_path", "kt_config"):
        assert said.count(key) == 1, key


@pytest.mark.parametrize("value", ["1e-4", "1.0e-4", 1e-4, "0.0001"])
def test_numbers_are_read_as_text_and_as_numbers(value: Any) -> None:
    assert given(learning_rate=value).learning_rate == 1e-4


def test_what_comes_later_comes_first() -> None:
    line = {"lora_rank": "4", "lora_target": "q_proj,v_proj", "max_samples": "null"}
    found = read_given(
        [("train.yaml", {"lora_rank": 16, "max_samples": 5}), ("the command line", line)]
    )
    s = found.settings
    assert (s.lora_rank, s.lora_target, s.max_samples) == (4, ("q_proj", "v_proj"), None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora_rnak": 8}, "train.yaml: kt does not know the key 'lora_rnak'"),
        ({"lora_rank": 0}, "train.yaml: lora_rank must be a whole number from 1 to 4,096, not 0"),
        ({"lora_rank": 10_000}, "lora_rank must be a whole number from 1 to 4,096, not 10000"),
        ({"lora_rank": True}, "lora_rank must be a whole number .* not True"),
        ({"lora_rank": 1.5}, "lora_rank must be a whole number .* not 1.5"),
        ({"cutoff_len": 1}, "cutoff_len must be a whole number from 2"),
        ({"num_train_epochs": 0}, "num_train_epochs must be a number above 0"),
        ({"learning_rate": 1e9}, "learning_rate must be a number above 0 and at most 1, not 1000000000.0"),
        ({"learning_rate": "nan"}, "learning_rate must be a number"),
        ({"learning_rate": "fast"}, "learning_rate must be a number .* not 'fast'"),
        ({"learning_rate": [1]}, r"learning_rate must be a number .* not \[1\]"),
        ({"lora_target": 7}, "lora_target must be names separated by commas, not 7"),
        ({"lora_target": ","}, "lora_target must have from 1 to .* names, not 0"),
        ({"packing": "perhaps"}, "packing must be true or false, not 'perhaps'"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type must be constant or .* not 'polynomial'"),
        ({"finetuning_type": "full"}, "finetuning_type must be lora, not 'full'"),
        ({"stage": "dpo"}, r"train.yaml: kt cannot train preferences \(stage: dpo\) yet"),
        ({"lora_dropout": 1}, "lora_dropout must be a number from 0 to 0.99, not 1"),
        ({"moe_aux_loss_coef": -1}, "moe_aux_loss_coef must be a number from 0"),
        ({"do_train": False}, "do_train is false"),
        ({"report_to": "wandb"}, "report_to: kt cannot report to 'wandb'"),
        ({"loraplus_lr_ratio": 5000, "learning_rate": 0.1}, "makes the learning rate of B 500"),
        ({"eval_strategy": "steps"}, "eval_steps says no number"),
        ({"save_strategy": "epoch"}, "save_strategy must be steps, not 'epoch'"),
        ({"output_dir": {"a": 1}}, "output_dir must be a text"),
        ({"output_dir": "a\0b"}, "output_dir must be a text"),
        ({"output_dir": "\ud800"}, "output_dir must be a text"),
        ({"dataset": "a\0b"}, "dataset must be names"),
        ({"dataset": date(2026, 1, 1)}, "dataset must be names separated by commas, not 2026-01-01"),
        ({"adam_epsilon": 1e-300}, "adam_epsilon must be a number from 1e-30 to 1"),
        ({"seed": -1}, "seed must be a whole number from 0"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_in_one_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as found:
        given(**values)
    assert "\n" not in str(found.value)


def test_no_may_be_a_switch_of_yaml() -> None:
    assert given(eval_strategy=False).eval_strategy == "no"


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError) as found:
        given(gradient_accumulation_step=4)
    assert found.value.hint == "did you mean gradient_accumulation_steps?"


BOMB = (
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "line 2, is not valid YAML: aliases are not allowed"),
        ("lora_rank: 8\nlora_rank: 9\n", "line 2, is not valid YAML: the key 'lora_rank' occurs twice"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1, is not valid YAML: could not determine"),
        ("a: [1, 2\n", "is not valid YAML"),
        ("- a\n- b\n", "does not consist of keys and values"),
        ("just text\n", "does not consist of keys and values"),
        ("", "does not consist of keys and values"),
        ("1: 2\n", "does not consist of keys and values"),
        ("a: " + "[" * 20_000, "is nested too deeply"),
        ("a: " + "x" * MAX_BYTES, "is larger than"),
        ("date: 2020-99-99\n", "is not valid YAML"),
        (b"a: \xff\xfe\n", "is not UTF-8 text"),
    ],
    ids=["bomb", "twice", "tag", "open", "list", "text", "empty", "number", "deep", "large", "date", "bytes"],
)  # fmt: skip
def test_hostile_files_are_refused(text: str | bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(KtError, match=said):
        read_document(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KtError, match=r"cannot read .*none.yaml: No such file"):
        read_document(tmp_path / "none.yaml")
