"""What a run has measured, in the files that LLaMA-Factory and transformers write: trainer_log.jsonl, a line for each
entry, and trainer_state.json, all of them in one object."""

from __future__ import annotations

import json
import math
from dataclasses import field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from ktcli import smallfiles
from ktcli.errors import BadCheckpoint
from ktcli.finetune.settings import FinetuneSettings
from ktcli.records import dataclass

LOG, TRAINER_STATE = "trainer_log.jsonl", "trainer_state.json"
_MAX_BYTES = 256 << 20


@dataclass(slots=True)
class RunLog:
    """The entries of a run.

    Attributes:
        steps: those of the whole run. per_epoch: those of an epoch.
        entries: as transformers' `log_history` has them.
    """

    settings: FinetuneSettings
    steps: int
    per_epoch: int
    entries: list[dict[str, Any]] = field(default_factory=list)

    def restore(self, folder: Path, step: int) -> None:
        """Replaces the entries by those of a checkpoint's trainer_state.json up to step `step`.

        Raises:
            BadCheckpoint: its file is damaged.
        """
        path = folder / TRAINER_STATE
        try:
            found = smallfiles.json_object(smallfiles.read_bounded(path, _MAX_BYTES))
            self.entries = [each for each in found["log_history"] if each["step"] <= step]
        except OSError as error:
            raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"{path} is damaged: {error}") from None

    def add(self, step: int, **figures: float) -> dict[str, Any]:
        """Adds an entry to the log in memory and returns it: a dict with "epoch", "step" and the figures, such as
        "loss", by name.
        """
        entry = {"epoch": round(step / self.per_epoch, 4), "step": step, **figures}
        self.entries.append(entry)
        return entry

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The logged training losses as pairs (step, loss)."""
        return [(each["step"], each["loss"]) for each in self.entries if "loss" in each]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The logged losses of held-out samples as pairs (step, loss)."""
        return [(each["step"], each["eval_loss"]) for each in self.entries if "eval_loss" in each]

    def begin(self, output: Path) -> None:
        """Writes the file trainer_log.jsonl in the output folder anew, with the entries so far.

        Raises:
            OSError: it cannot be written.
        """
        text = "".join(_line(each, self.steps) for each in self.entries)
        smallfiles.write(output / LOG, text)

    def append(self, output: Path, entry: dict[str, Any], seconds: float, tokens: int) -> None:
        """Appends an entry to trainer_log.jsonl in the output folder, as a line of JSON.

        Args:
            seconds: the seconds that the run has taken.
            tokens: the tokens that were read so far.
        Raises:
            OSError: it cannot be written.
        """
        # Not flushed to the disk: checkpoints have it, too.
        with (output / LOG).open("a", encoding="utf-8") as file:
            file.write(_line(entry, self.steps, seconds, tokens))

    def write_state(self, folder: Path, step: int) -> None:
        """Writes the log and the settings of the run after `step` steps to trainer_state.json in a folder, as
        transformers does.

        Raises:
            OSError: it cannot be written.
        """
        s = self.settings
        document = {
            "best_metric": None,
            "best_model_checkpoint": None,
            "epoch": step / self.per_epoch,
            "eval_steps": s.eval_steps,
            "global_step": step,
            "is_local_process_zero": True,
            "is_world_process_zero": True,
            "log_history": self.entries,
            "logging_steps": s.logging_steps,
            "max_steps": self.steps,
            "num_train_epochs": s.num_train_epochs,
            "save_steps": s.save_steps,
            "train_batch_size": s.per_device_train_batch_size,
        }
        smallfiles.write(folder / TRAINER_STATE, json.dumps(document, indent=2) + "\n")


def has_overfitted(evaluations: list[tuple[int, float]]) -> bool:
    """Returns whether the last three of the losses of held-out samples, pairs (step, loss) by step, are each higher
    than the one before.
    """
    last = [loss for _, loss in evaluations[-4:]]
    return len(last) == 4 and all(a < b for a, b in pairwise(last))


def _line(entry: dict[str, Any], steps: int, seconds: float | None = None, tokens: int = 0) -> str:
    """A line of LLaMA-Factory's log."""
    names = {"loss": "loss", "eval_loss": "eval_loss", "learning_rate": "lr", "epoch": "epoch"}
    line: dict[str, Any] = {"current_steps": entry["step"], "total_steps": steps}
    line |= {names[k]: v for k, v in entry.items() if k in names and math.isfinite(v)}
    line["percentage"] = round(100 * entry["step"] / steps, 2)
    if seconds is not None:
        line["elapsed_time"] = str(timedelta(seconds=int(seconds)))
        left = seconds / entry["step"] * (steps - entry["step"])
        line["remaining_time"] = str(timedelta(seconds=int(left)))
        line["total_tokens"] = tokens
        line["throughput"] = round(tokens / seconds, 2) if seconds else 0.0
    return json.dumps(line) + "\n"
