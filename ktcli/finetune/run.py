"""The loop over optimizer steps: all documents of a step at once, evaluation, checkpoints and the log.

Nothing here prints: whoever watches is told of each step. A step is done whole or not at all; between steps the run can
be stopped, and it goes on from a checkpoint with the same bits as if it had not been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from ktcli.errors import KtError, NotFinite
from ktcli.finetune import checkpoint
from ktcli.finetune.checkpoint import RunIdentity, SavedState
from ktcli.finetune.log import RunLog, has_overfitted
from ktcli.finetune.optimizer import FactorOptimizer
from ktcli.finetune.order import RateSchedule
from ktcli.finetune.plan import TrainingSplit, evaluation_size
from ktcli.finetune.settings import FinetuneSettings
from ktcli.finetune.trained import write_trained
from ktcli.records import dataclass
from ktcli.samples.sample import Sample
from ktcli.training.model import TrainableModel


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of one step.

    Attributes:
        step, steps: the steps that were done, of how many.
        rate: the learning rate. norm: that of the gradient, before it was clipped.
        tok_s: the tokens of a second since the run began or went on.
        memory_bytes: those of this process. left_s: the seconds that the other steps will take.
        logged: whether it has an entry in the log.
    """

    step: int
    steps: int
    loss: float
    rate: float
    norm: float
    tok_s: float
    memory_bytes: int
    left_s: float
    logged: bool


class RunWatcher(Protocol):
    """The interface of a listener for the progress of a run."""

    def stepped(self, report: StepReport) -> None:
        """Called after each optimizer step with its figures: loss, learning rate, speed, memory."""

    def evaluated(self, step: int, loss: float) -> None:
        """Called after each evaluation with the number of steps done and the mean loss, in nats, over the trained
        tokens of the held-out samples.
        """

    def warn(self, text: str) -> None:
        """Called with a sentence that the user should know although the run goes on."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The output folder of a run, and the inputs that its checkpoints depend on.

    Attributes:
        output: the folder, which exists.
        base: the name of the base model in adapter_config.json.
        checkpoint_bytes: about the size of a checkpoint.
    """

    output: Path
    base: str
    identity: RunIdentity
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run.

    Attributes:
        checkpoint: the last one.
        loss: that of the last step. evaluated: that of held-out samples at the end; None: there are none.
        complete: whether all steps were done.
    """

    step: int
    steps: int
    checkpoint: Path
    loss: float | None
    evaluated: float | None
    seconds: float
    tokens: int
    complete: bool


class FinetuneRun:
    """A run over the samples of some data.

    Attributes:
        step: the steps that were done. steps: those of the whole run.
        log: what was measured.
    """

    def __init__(
        self,
        trained: TrainableModel,
        data: TrainingSplit,
        settings: FinetuneSettings,
        place: RunPlace,
    ) -> None:
        self._trained, self._data, self._settings, self._place = trained, data, settings, place
        self.steps = data.order.steps(settings)
        self.log = RunLog(settings, self.steps, data.order.steps_per_epoch)
        self._schedule = RateSchedule.of(settings, self.steps)
        self._optimizer = FactorOptimizer(trained.factors, settings)
        self._held = data.evaluated
        self.step = self._tokens = 0
        self._seconds = 0.0
        self._since: list[float] = []  # losses since the last entry of the log
        self._loss: float | None = None
        self._evaluated: float | None = None
        self._saved: int | None = None

    def restore(self, folder: Path, saved: SavedState) -> None:
        """Sets the run to the state of a checkpoint: step, moments of the optimizer, log; the model must have the
        checkpoint's factors already.

        Raises:
            BadCheckpoint: the checkpoint is damaged.
        """
        checkpoint.restore_optimizer(folder, saved.step, self._optimizer)
        self.log.restore(folder, saved.step)
        self.step, self._tokens, self._seconds = saved.step, saved.tokens, saved.seconds
        self._since = list(saved.losses)
        self._saved = saved.step if folder.parent == self._place.output else None

    def train(self, watcher: RunWatcher, stop: Callable[[], bool] = lambda: False) -> RunResult:
        """Runs the remaining optimizer steps, with evaluations and checkpoints, and saves a checkpoint of the last;
        returns the outcome.

        Args:
            stop: called after each step but the last; the run ends there if it returns True.
        Raises:
            KtError: a loss or a gradient is not finite, or the log or a checkpoint cannot be written; earlier
                checkpoints are kept. In the first case the adapter of the last complete step is saved, unless it, too,
                gives such numbers.
        """
        self._written(lambda: self.log.begin(self._place.output))
        begun = time.perf_counter(), self.step, self._tokens
        while self.step < self.steps:
            doing = f"step {self.step + 1} of {self.steps}"
            try:
                self._one_step(watcher, begun)
                last = self.step == self.steps
                doing = f"the evaluation behind step {self.step} of {self.steps}"
                if self._is_evaluated(last):
                    self._evaluate(watcher)
            except NotFinite as error:
                raise self._diverged(doing, error) from error
            ends = last or stop()
            if ends or self.step % self._settings.save_steps == 0:
                self._save()
            if ends:
                break
        if self._saved != self.step:
            self._save()
        return self._result()

    def evaluate(self) -> float | None:
        """Returns the loss of the held-out samples: the mean cross entropy of their trained tokens, in nats; None: no
        samples are held out. Raises what `TrainableModel.loss` raises.
        """
        total, tokens = 0.0, 0
        size = evaluation_size(self._settings)
        for first in range(0, len(self._held), size):
            some = self._held[first : first + size]
            count = sum(each.trained_tokens for each in some)
            total += count * self._trained.loss(*_documents(some))
            tokens += count
        return total / tokens if tokens else None

    # --- one step ---------------------------------------------------------------------------------

    def _one_step(self, watcher: RunWatcher, begun: tuple[float, int, int]) -> None:
        samples = self._samples(self.step)
        before = time.perf_counter()
        share = self._schedule.share(self.step)
        found = self._trained.loss_and_gradients(*_documents(samples), self.step)
        norm = self._optimizer.step(share)
        self.step += 1
        self._seconds += time.perf_counter() - before
        self._tokens += sum(len(each.ids) for each in samples)
        self._loss = found.loss
        self._since.append(found.loss)
        report = self._report(found.loss, share, norm, begun)
        if report.logged:
            figures = {} if found.balance is None else {"aux_loss": found.balance}
            loss = sum(self._since) / len(self._since)
            self._note(loss=loss, grad_norm=norm, learning_rate=report.rate, **figures)
            self._since.clear()
        watcher.stepped(report)

    def _report(
        self, loss: float, share: float, norm: float, begun: tuple[float, int, int]
    ) -> StepReport:
        seconds = max(time.perf_counter() - begun[0], 1e-9)
        per_step = seconds / (self.step - begun[1])
        return StepReport(
            self.step,
            self.steps,
            loss,
            share * self._settings.learning_rate,
            norm,
            (self._tokens - begun[2]) / seconds,
            psutil.Process().memory_info().rss,
            per_step * (self.steps - self.step),
            self.step % self._settings.logging_steps == 0 or self.step == self.steps,
        )

    def _samples(self, step: int) -> list[Sample]:
        """The samples of step 0, 1, …"""
        return [self._data.read.samples[n] for n in self._data.order.samples(step)]

    # --- numbers that are not finite --------------------------------------------------------------

    def _diverged(self, doing: str, error: NotFinite) -> KtError:
        """Returns the error with which the run ends. No factor has changed since the last step, so the adapter of that
        is saved, beside all earlier checkpoints: unless it gives such numbers of that step's own samples, too."""
        kept = ""
        if self.step and self._saved != self.step:
            if self._is_sound():
                try:
                    self._save(limited=False)
                except KtError as unsaved:
                    kept = f"; the adapter of step {self.step} could not be saved: {unsaved}"
            else:
                kept = f"; the adapter of step {self.step} gives such numbers of any sample"
        hint = error.hint
        if self._saved is not None:
            folder = self._place.output / f"checkpoint-{self._saved}"
            kept += f"; {folder} has the adapter of step {self._saved}, the last good one"
            hint = (
                "train on from it, into another output_dir, with a lower learning rate: "
                f"adapter_name_or_path={folder}; or use it as it is: kt adapter import {folder}"
            )
        return KtError(f"{doing}: {error}{kept}", hint=hint)

    def _is_sound(self) -> bool:
        """Returns whether the adapter gives finite numbers of the samples that it was trained with last."""
        try:
            self._trained.loss(*_documents(self._samples(self.step - 1)))
        except NotFinite:
            return False
        return True

    # --- evaluation -------------------------------------------------------------------------------

    def _is_evaluated(self, last: bool) -> bool:
        each = self._settings.evaluated_each(self._data.order.steps_per_epoch)
        if not self._held or each is None:
            return False
        return last or self.step % each == 0

    def _evaluate(self, watcher: RunWatcher) -> None:
        self._evaluated = self.evaluate()
        if self._evaluated is None:
            return
        self._note(eval_loss=self._evaluated)
        watcher.evaluated(self.step, self._evaluated)
        found = self.log.evaluations
        if has_overfitted(found):
            best = min(found, key=lambda each: each[1])
            watcher.warn(
                f"the evaluation loss has risen three times in a row, to {self._evaluated:.4f}: the adapter learns "
                f"its rows by heart; the loss was lowest at step {best[0]} ({best[1]:.4f}): stop there (max_steps="
                f"{best[0]}), or use more data or a lower learning_rate"
            )

    # --- what is written --------------------------------------------------------------------------

    def _note(self, **figures: float) -> None:
        entry = self.log.add(self.step, **figures)
        self._written(
            lambda: self.log.append(self._place.output, entry, self._seconds, self._tokens)
        )

    def _save(self, *, limited: bool = True) -> None:
        """Writes a checkpoint; `limited`: then removes the earliest beyond `save_total_limit`."""
        state = SavedState(
            self.step, self._place.identity, self._settings.document, self._tokens, self._seconds, self._since,
        )  # fmt: skip
        checkpoint.save(
            self._place.output, state, self._optimizer, self._write, self._place.checkpoint_bytes
        )
        self._saved = self.step
        if limited:
            checkpoint.limit(self._place.output, self._settings.save_total_limit)

    def _write(self, folder: Path) -> None:
        self.write_adapter(folder)
        self.log.write_state(folder, self.step)

    def write_adapter(self, folder: Path) -> None:
        """Writes the current LoRA factors as an adapter in peft's format into a folder.

        Raises:
            OSError: it cannot be written.
        """
        write_trained(self._trained, folder, self._place.base, rslora=self._settings.use_rslora)

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise KtError(
                f"cannot write to {self._place.output}: {error.strerror}",
                hint="free some space, and continue from the last checkpoint: resume_from_checkpoint=true",
            ) from error

    def finish(self) -> None:
        """Writes the adapter and trainer_state.json to the output folder itself, where readers of LLaMA-Factory's
        output look for them.

        Raises:
            KtError: they cannot be written.
        """
        self._written(lambda: self._write(self._place.output))

    def _result(self) -> RunResult:
        return RunResult(
            self.step,
            self.steps,
            self._place.output / f"checkpoint-{self.step}",
            self._loss,
            self._evaluated,
            self._seconds,
            self._tokens,
            self.step == self.steps,
        )


def _documents(samples: Sequence[Sample]) -> tuple[list[tuple[int, ...]], list[tuple[bool, ...]]]:
    return [each.ids for each in samples], [each.trained for each in samples]
