"""The settings of a run, under the names that LLaMA-Factory gives them in its YAML files.

A field is a key: its default, and a reader that says what its value must be. What a key means is LLaMA-Factory's
documentation; where kt differs, the field says so. Defaults are those of its published LoRA examples, not those of its
arguments, which are made for full fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields
from difflib import get_close_matches
from typing import Any

from ktcli.errors import UsageError
from ktcli.finetune.values import (
    Reader,
    WrongValue,
    is_nothing,
    names,
    one_of,
    real,
    shares,
    switch,
    switch_or_text,
    text,
    whole,
)
from ktcli.records import dataclass
from ktcli.samples.sample import MIXES, SampleSettings

MAX_RANK = 4096  # of an adapter that kt reads
HALF_MOMENTS = "adamw_bf16"  # a name of kt's own: LLaMA-Factory has none for it
_MOST = 1_000_000_000
_MOST_RATE = 1.0  # AdamW moves every number by about the learning rate; useful ones are below 1e-2
_LEARNED_LATER = {
    "dpo": "preferences (stage: dpo)",
    "kto": "KTO",
    "rm": "reward models",
    "ppo": "PPO",
}


def _key(default: Any, read: Reader) -> Any:
    """A field of a setting, with the reader of its values."""
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True, slots=True)
class FinetuneSettings:
    """The settings of a run. None: nobody said, and the comment says what is done then."""

    # The model.
    model_name_or_path: str = _key("", text)
    adapter_name_or_path: str | None = _key(None, text)  # from which training begins; None: anew
    stage: str = _key("sft", one_of("sft", "pt"))
    finetuning_type: str = _key("lora", one_of("lora"))
    # The adapter.
    lora_rank: int = _key(8, whole(1, MAX_RANK))
    lora_alpha: float | None = _key(None, real(0, 1e6, above=True))  # None: 2 r
    lora_dropout: float = _key(0.0, real(0, 0.99))  # of what dense matrices read; experts have none
    lora_target: tuple[str, ...] = _key(("all",), names)
    use_rslora: bool = _key(False, switch)
    loraplus_lr_ratio: float | None = _key(None, real(0, 1e4, above=True))  # None: 1
    # The data.
    dataset: tuple[str, ...] | None = _key(None, names)
    dataset_dir: str = _key("data", text)
    eval_dataset: tuple[str, ...] | None = _key(None, names)
    val_size: float = _key(0.0, real(0, _MOST))  # below 1: a share of the samples
    cutoff_len: int = _key(2048, whole(2, 1 << 20))
    max_samples: int | None = _key(None, whole(1, _MOST))
    mix_strategy: str = _key("concat", one_of(*MIXES))
    interleave_probs: tuple[float, ...] = _key((), shares)
    mask_history: bool = _key(False, switch)
    train_on_prompt: bool = _key(False, switch)
    packing: bool | None = _key(None, switch)  # None: in stage pt
    neat_packing: bool = _key(False, switch)
    enable_thinking: bool | None = _key(None, switch)
    default_system: str | None = _key(None, text)
    # What is written, and when.
    output_dir: str | None = _key(None, text)  # None: KT_HOME/finetune/NAME
    overwrite_output_dir: bool = _key(False, switch)
    resume_from_checkpoint: bool | str = _key(False, switch_or_text)
    logging_steps: int = _key(1, whole(1, _MOST))
    save_strategy: str = _key("steps", one_of("steps"))
    save_steps: int = _key(500, whole(1, _MOST))
    save_total_limit: int | None = _key(2, whole(1, _MOST))
    # None: as eval_steps says.
    eval_strategy: str | None = _key(None, one_of("no", "steps", "epoch"))
    eval_steps: int | None = _key(None, whole(1, _MOST))  # None: after each epoch
    per_device_eval_batch_size: int = _key(8, whole(1, 1 << 16))
    plot_loss: bool = _key(True, switch)
    report_to: tuple[str, ...] = _key(("none",), names)
    # The steps.
    per_device_train_batch_size: int = _key(1, whole(1, 1 << 16))
    gradient_accumulation_steps: int = _key(8, whole(1, 1 << 16))
    learning_rate: float = _key(1e-4, real(0, _MOST_RATE, above=True))
    num_train_epochs: float = _key(3.0, real(0, 10_000, above=True))
    max_steps: int = _key(-1, whole(-1, _MOST))  # 0 or -1: as many as the epochs have
    lr_scheduler_type: str = _key(
        "cosine", one_of("constant", "constant_with_warmup", "linear", "cosine")
    )
    warmup_ratio: float = _key(0.1, real(0, 1))
    warmup_steps: int = _key(0, whole(0, _MOST))  # 0: as warmup_ratio says
    weight_decay: float = _key(0.0, real(0, 1))
    max_grad_norm: float = _key(1.0, real(0, 1e9))  # 0: gradients are not clipped
    optim: str = _key("adamw_torch", one_of("adamw_torch", "adamw_torch_fused", HALF_MOMENTS))
    adam_beta1: float = _key(0.9, real(0, 0.999999))
    adam_beta2: float = _key(0.999, real(0, 0.999999))
    adam_epsilon: float = _key(1e-8, real(1e-30, 1))  # a smaller one is 0 in f32, and 0 / 0 NaN
    seed: int = _key(42, whole(0, (1 << 63) - 1))
    # How a step is computed.
    disable_gradient_checkpointing: bool = _key(False, switch)
    kt_cpu_activation: str | None = _key(None, one_of("retain", "recompute"))
    moe_aux_loss_coef: float = _key(0.0, real(0, 1e6))
    do_train: bool = _key(True, switch)

    @property
    def has_half_moments(self) -> bool:
        """Whether the moments of AdamW are kept in bf16."""
        return self.optim == HALF_MOMENTS

    @property
    def betas(self) -> tuple[float, float]:
        """The decay rates (beta1, beta2) of AdamW's moments."""
        return self.adam_beta1, self.adam_beta2

    @property
    def alpha(self) -> float:
        """The alpha of the LoRA adapter: `lora_alpha`, or twice the rank if that is None."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def documents(self) -> int:
        """The number of samples (if packed, of packed rows of samples) in an optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def packs(self) -> bool:
        """Whether samples are joined up to `cutoff_len` tokens, and then count as one of `documents`."""
        return self.neat_packing or (self.stage == "pt" if self.packing is None else self.packing)

    @property
    def retains(self) -> bool:
        """Whether the activations inside each layer are kept for the backward pass, instead of being computed again."""
        return self.disable_gradient_checkpointing or self.kt_cpu_activation == "retain"

    def evaluated_each(self, per_epoch: int) -> int | None:
        """Returns the number of optimizer steps from one evaluation of the held-out samples to the next, if an epoch
        has `per_epoch` steps; None: they are never evaluated.
        """
        if self.eval_strategy == "no":
            return None
        return per_epoch if self.eval_strategy == "epoch" else self.eval_steps or per_epoch

    @property
    def samples(self) -> SampleSettings:
        """The settings that decide how rows of data become samples, under the same names."""
        names = (each.name for each in fields(SampleSettings))
        return SampleSettings(**{name: getattr(self, name) for name in names})

    @property
    def document(self) -> dict[str, Any]:
        """All settings by name, as values that JSON and YAML can express: lists in place of tuples."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


READERS: Mapping[str, Reader] = {
    each.name: each.metadata["read"] for each in fields(FinetuneSettings)
}

# Keys of LLaMA-Factory that change nothing here, by the reason.
_PLACED = """
    use_kt kt_config kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path kt_optimize_rule cpu_infer
    chunk_size kt_expert_weight_format kt_backend kt_num_threads kt_tp_enabled kt_threadpool_count kt_max_cache_depth
    kt_weight_lifecycle kt_share_backward_bb
""".split()
_NOT_NEEDED = """
    trust_remote_code bf16 fp16 pure_bf16 tf32 ddp_timeout preprocessing_num_workers overwrite_cache template
    dataloader_num_workers save_only_model do_eval flash_attn deepspeed fsdp include_num_input_tokens_seen
""".split()
WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(_PLACED, "kt decides itself where weights lie and what computes"),
    **dict.fromkeys(_NOT_NEEDED, "kt does not need them"),
}


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """Settings as the user gave them.

    Attributes:
        ignored: sentences on keys that change nothing.
    """

    settings: FinetuneSettings
    ignored: tuple[str, ...]


def read_given(given: Sequence[tuple[str, Mapping[str, Any]]]) -> GivenSettings:
    """Returns the fine-tuning settings from several sources, later ones overriding earlier ones, and sentences on keys
    that have no effect.

    Args:
        given: keys with their values, and where each source is: "train.yaml", "the command line".
    Raises:
        UsageError: a key is not known, a value is wrong, or kt cannot do what is asked for.
    """
    values: dict[str, Any] = {}
    ignored: dict[str, list[str]] = {}
    for where, found in given:
        for key, value in found.items():
            if key in WITHOUT_EFFECT:
                keys = ignored.setdefault(WITHOUT_EFFECT[key], [])
                keys.extend([key] * (key not in keys))
            elif key not in READERS:
                raise _unknown(key, where)
            elif is_nothing(value):
                values.pop(key, None)
            else:
                values[key] = _read(key, value, where)
    settings = FinetuneSettings(**values)
    require_possible(settings)
    said = (f"ignored, as {why}: {', '.join(keys)}" for why, keys in ignored.items())
    return GivenSettings(settings, tuple(said))


def require_possible(settings: FinetuneSettings) -> None:
    """Raises an error if fine-tuning settings contradict each other, or ask for what kt cannot do.

    Raises:
        UsageError: the settings are contradictory or not supported.
    """
    s = settings
    if not s.do_train:
        raise UsageError(
            "do_train is false, so nothing is to be trained", hint="kt eval measures a model"
        )
    if s.loraplus_lr_ratio and s.learning_rate * s.loraplus_lr_ratio > _MOST_RATE:
        raise UsageError(
            f"loraplus_lr_ratio {s.loraplus_lr_ratio:g} makes the learning rate of B "
            f"{s.learning_rate * s.loraplus_lr_ratio:g}, more than {_MOST_RATE:g}",
            hint="use a smaller ratio or learning_rate",
        )
    if s.eval_strategy == "steps" and s.eval_steps is None:
        raise UsageError(
            "eval_strategy is steps, but eval_steps says no number", hint="add eval_steps=100"
        )
    if others := set(s.report_to) - {"none", "tensorboard"}:
        raise UsageError(
            f"report_to: kt cannot report to {sorted(others)[0][:60]!r}",
            hint="use tensorboard or none; trainer_log.jsonl has every figure",
        )


def _read(key: str, value: Any, where: str) -> Any:
    """The value of a key.

    Raises:
        UsageError: it can have no such value.
    """
    if key == "stage" and str(value) in _LEARNED_LATER:
        raise UsageError(
            f"{where}: kt cannot train {_LEARNED_LATER[str(value)]} yet",
            hint="use stage: sft or stage: pt",
        )
    try:
        return READERS[key](value)
    except WrongValue as error:
        raise UsageError(f"{where}: {key} {error}") from None


def _unknown(key: str, where: str) -> UsageError:
    near = get_close_matches(key, [*READERS, *WITHOUT_EFFECT], 1, 0.6)
    hint = f"did you mean {near[0]}?" if near else "docs/finetune.md lists the keys that kt knows"
    return UsageError(f"{where}: kt does not know the key {key[:80]!r}", hint=hint)
