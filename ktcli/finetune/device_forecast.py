"""Predicts how long an optimizer step takes that a GPU and the CPU share: attention, dense parts and the head at the
GPU's rates, experts at the CPU's, and what passes between them at the link's. One waits for the other.

Every share of the GPU's rates is assumed: no step was measured on one.
"""

from __future__ import annotations

from ktcli.finetune.forecast import HEAD_BYTES, NUMBER_BYTES, Forecaster, StepLoad
from ktcli.ops.part import ModelPart
from ktcli.planner.cost import READ_SHARE
from ktcli.planner.device_cost import GEMM_SHARE, DeviceRates
from ktcli.planner.spec import PartWork, cache_work
from ktcli.records import dataclass
from ktcli.training.lora import DenseFactors
from ktcli.training.loss import chunk_rows

# That pass through the GPU's memory for each number of a matrix that is decoded.
_DECODED_BYTES = 40
_ATTENTION = 1 / 32  # operations of attention in f32, of the peak in bf16
# Rows of a layer with experts: in and out; in, their gradient, and back.
_CROSSED_FORWARD, _CROSSED_BACKWARD = 2, 3
_COPIED = 2  # passes for which a layer comes to the GPU: backward, computed again, it is there


@dataclass(frozen=True)
class DeviceForecaster(Forecaster):
    """A model on a machine with a GPU.

    Attributes:
        device: the rates of the GPU.
        streamed_bytes: of the dense weights that come to it when their turn does.
    """

    device: DeviceRates
    streamed_bytes: int

    def _forward_s(self, work: PartWork, tokens: float) -> float:
        if work.part is ModelPart.EXPERTS:
            return super()._forward_s(work, tokens) + self._crossed_s(_CROSSED_FORWARD, tokens)
        return self._product_s(work, tokens)

    def _backward_s(self, work: PartWork, tokens: float) -> float:
        if work.part is ModelPart.EXPERTS:
            return super()._backward_s(work, tokens) + self._crossed_s(_CROSSED_BACKWARD, tokens)
        return self._product_s(work, tokens)

    def _product_s(self, work: PartWork, tokens: float) -> float:
        """The seconds of a product on the GPU, whose matrix is decoded first."""
        decoded = _DECODED_BYTES * work.ops / (2 * max(tokens, 1.0))
        return self._moved_s(decoded) + work.ops / (self.device.bf16_ops * GEMM_SHARE)

    def _crossed_s(self, times: int, tokens: float) -> float:
        """The seconds in which so many rows of each token pass the link, for all layers with experts."""
        spec = self.model.spec
        return times * 4 * tokens * spec.hidden * spec.moe_layers / self.device.copy_bps

    def _head_s(self, trained: float, *, backward: bool) -> float:
        spec, one = self.model.spec, self._head
        if one is None:
            return 0.0
        pieces = -(-trained // (min(trained, chunk_rows(spec.vocab)) or 1.0))
        passes = 2 if backward else 1
        decoded = self._moved_s(_DECODED_BYTES * one.ops / 2 * pieces)
        ops = one.ops * trained / (self.device.bf16_ops * GEMM_SHARE)
        return passes * (decoded + ops) + self._moved_s(HEAD_BYTES * trained * spec.vocab)

    def _attention_s(self, load: StepLoad, times: float) -> float:
        states = self.model.spec.states
        ops = sum(count * cache_work(states, 0, length)[1] for length, count in load.lengths)
        return times * ops / (self.device.bf16_ops * _ATTENTION)

    def _rows_s(self, tokens: float, each_bytes: float, passes: float) -> float:
        copied = min(passes, _COPIED) * self.streamed_bytes / self.device.copy_bps
        return copied + super()._rows_s(tokens, each_bytes, passes)

    def _optimizer_s(self) -> float:
        dense = sum(each.numbers for each in self.factors if isinstance(each, DenseFactors))
        others = sum(each.numbers for each in self.factors) - dense
        host = NUMBER_BYTES * others / self.rates.read_bps
        return host + self._moved_s(NUMBER_BYTES * dense)

    def _moved_s(self, size_bytes: float) -> float:
        return size_bytes / (self.device.read_bps * READ_SHARE)
