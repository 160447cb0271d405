"""A model that can be trained: the loss of documents, and its gradient with respect to the factors.

A step goes through one layer after the other with all its rows, in groups of as many documents as fit into one native
product: more rows would read the weights again in any case. Between layers only the residual is kept, and what the
routers have chosen; in the backward pass each layer is computed again, unless graphs are retained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from ktcli.engine.loader import PackSource, Progress, TensorSource, expert_rows, load_tensors
from ktcli.errors import NotFinite, UsageError
from ktcli.models import Model, build
from ktcli.native import Pool
from ktcli.ops.native import Loaded
from ktcli.ops.torch.backend import StepInputs
from ktcli.records import dataclass
from ktcli.training.backend import DifferentiableBackend
from ktcli.training.balance import RouterBalance
from ktcli.training.denselayers import DenseLayers, TrainingDevice, is_read, load_apart
from ktcli.training.deviceproducts import DeviceProducts
from ktcli.training.documents import DocumentGroup, Documents, pack_documents
from ktcli.training.dropout import Dropout
from ktcli.training.lora import DenseFactors, LoraSettings, TrainedFactors, factors_for
from ktcli.training.loss import chunk_rows, mean_loss, token_loss
from ktcli.training.products import Products
from ktcli.training.programs import NativeProducts, ProgramSizes
from ktcli.training.recorded import products_of
from ktcli.training.weights import embedding_of, join_factors
from ktcli.weights.pack import Pack
from ktcli.weights.recipe import Recipe

Ids = Sequence[int]
Mask = Sequence[bool]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The options for computing a training step.

    Attributes:
        context: the most tokens of a document.
        exact: whether all is f32; else products round what they read as those of a chat do.
        retain: whether the graph of each layer is kept for the backward pass, instead of being computed again.
        residuals: the type in which the residual before each layer is kept, from which it is computed again; float32 or
            bfloat16. If exact, float32.
        max_rows: the most rows that go through a product at once, and the documents that go through a layer together
            have; more read the weights again.
        balance: the factor of the routers' auxiliary loss; see `balance`.
        device: what computes attention and dense parts, whose factors then are there; None: the CPU.
    """

    context: int = 2048
    exact: bool = False
    retain: bool = False
    residuals: torch.dtype = torch.bfloat16
    max_rows: int = 4096
    balance: float = 0.0
    device: TrainingDevice | None = None


USUAL = TrainingOptions()
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepGradients:
    """The result of a step. The gradients are at the factors.

    Attributes:
        loss: the mean cross entropy of trained tokens, in nats.
        tokens: their number.
        embedded: the gradient [T, H] f32 at the first layer's residual.
        balance: the routers' auxiliary loss, without its factor; None: it has none.
    """

    loss: float
    tokens: int
    embedded: Tensor
    balance: float | None = None


@dataclass(slots=True)
class _Passed:
    """A layer that a group of a step's documents has gone through.

    Attributes:
        x: the residual before it.
        chosen: the ids that its router has chosen, if it has one.
        out: the residual behind it, if its graph is retained, and `logits` those of its router.
    """

    group: DocumentGroup
    x: Tensor
    chosen: tuple[Tensor, ...]
    out: Tensor | None = None
    logits: Sequence[Tensor] = ()


class TrainableModel:
    """A model with trained factors. `open` makes one.

    Attributes:
        factors: what is trained, by the names of targets.
        options: how steps are computed.
        dropout: of what factors of dense matrices read.
    """

    def __init__(
        self,
        model: Model,
        loaded: Mapping[str, Loaded],
        factors: Sequence[TrainedFactors],
        products: Products,
        added: Sequence[bool],
        options: TrainingOptions,
        dropout: Dropout | None = None,
        dense: DenseLayers | None = None,
    ) -> None:
        self.model, self.options = model, options
        self._device, self._dense = _CPU if dense is None else dense.device, dense
        self.factors = {each.name: each for each in factors}
        self.dropout = dropout or Dropout(0.0, 0)
        self._weights = join_factors(model, loaded, products, factors, added, self.dropout, dense)
        self._embedding = embedding_of(model, loaded)
        rows = expert_rows(model)
        self._routed = [sum(each < i for each in rows) for i in range(model.spec.layers)]

    @classmethod
    def open(
        cls, pack: Pack, pool: Pool, settings: LoraSettings, options: TrainingOptions = USUAL
    ) -> Self:
        """Returns the model of a pack, loaded, with new trained factors; raises as `load`."""
        source = PackSource(pack, pool)
        return cls.load(build(pack.config), pack.recipe, source, pool, settings, options)

    @classmethod
    def load(
        cls,
        model: Model,
        recipe: Recipe,
        source: TensorSource,
        pool: Pool,
        settings: LoraSettings,
        options: TrainingOptions = USUAL,
        progress: Progress | None = None,
    ) -> Self:
        """Returns a model with new trained factors, its weights loaded from a source.

        Raises:
            UsageError: the family cannot be trained, the settings do not fit the model, or the context of the options
                is longer than the model's.
            BadPack: the files are damaged.
        """
        found = products_of(model)  # refuses before anything is read
        if options.context > model.spec.context:
            raise UsageError(
                f"documents of {options.context} tokens are longer than the model's context of {model.spec.context}"
            )
        model = model.at(options.context)
        factors = factors_for(model, settings)
        sizes = ProgramSizes(options.max_rows, chunk_rows(model.spec.vocab), options.exact)
        dropout = Dropout(settings.dropout, settings.seed)
        if options.device is None:
            read = [tensor for tensor in model.tensors if is_read(tensor)]
            loaded = load_tensors(read, recipe, source, pool, progress).by_name
            products: Products = NativeProducts(pool, loaded, found, factors, sizes)
            return cls(model, loaded, factors, products, found.added, options, dropout)
        parts = load_apart(model, recipe, source, pool, options.device, progress)
        for each in factors:
            if isinstance(each, DenseFactors):
                each.move(options.device.device)
        native = NativeProducts(pool, parts.host, replace(found, linear=()), factors, sizes)
        products = DeviceProducts(parts.dense, native, found.linear, exact=options.exact)
        return cls(model, parts.host, factors, products, found.added, options, dropout, parts.dense)

    def loss_and_gradients(
        self, documents: Sequence[Ids], masks: Sequence[Mask], number: int = 0
    ) -> StepGradients:
        """Returns the loss of a training step, with the gradient at the embedded rows; overwrites the gradients of the
        factors.

        Args:
            documents: the token ids of each document.
            masks: for each id whether it is trained; every trained token of the step counts the same.
            number: the number of the step, which decides what dropout drops.
        Raises:
            UsageError: a document or a mask is not valid. DeviceError: as `DenseLayers.step`.
            NotFinite: a number is NaN or infinite; the message names the layer. The gradients are then not to be used.
        """
        step = self._packed(documents, masks)
        for each in self.factors.values():
            each.zero_gradients()
        passed: list[list[_Passed]] = []
        balance = self._balance()
        with self.dropout.during(number), self._on_device():
            x = self._forward(step, passed, balance)
            loss, dx = token_loss(self._head, x, step, self.model.spec.vocab)
            _require_finite(dx, "the gradient of the output head")
            for layer in reversed(range(len(passed))):
                dx = self._backward(layer, passed.pop(), dx, balance)
            dx = dx.cpu()
        return StepGradients(loss, len(step.rows), dx, None if balance is None else balance.loss)

    def loss(self, documents: Sequence[Ids], masks: Sequence[Mask]) -> float:
        """Returns the mean cross entropy of the trained tokens of the documents, in nats, without gradients; raises as
        `loss_and_gradients`.
        """
        step = self._packed(documents, masks)
        with torch.no_grad(), self._on_device():
            loss = mean_loss(self._head, self._forward(step), step, self.model.spec.vocab)
        if not math.isfinite(loss):
            raise NotFinite("the output head")
        return loss

    def logits(self, documents: Sequence[Ids]) -> tuple[Tensor, ...]:
        """Returns the logits [tokens, vocab] f32 of each document, in main memory; raises as `loss_and_gradients`."""
        step = self._packed(documents, None)
        with torch.no_grad(), self._on_device():
            x = self._forward(step)
            parts = torch.split(x, chunk_rows(self.model.spec.vocab))
            logits = torch.cat([self._head(part).cpu() for part in parts])
            return tuple(torch.split(logits, list(step.lengths)))

    def _packed(self, documents: Sequence[Ids], masks: Sequence[Mask] | None) -> Documents:
        found = pack_documents(
            documents, masks, vocab=self.model.spec.vocab, context=self.options.context
        )
        return found.on(self._device)

    def _on_device(self) -> AbstractContextManager[None]:
        """Encloses what a device does, if one does anything."""
        return nullcontext() if self._dense is None else self._dense.step()

    def _balance(self) -> RouterBalance | None:
        """What adds up the choices of a step's routers, if they have an auxiliary loss."""
        spec = self.model.spec
        if not self.options.balance or not spec.experts:
            return None
        return RouterBalance(spec.experts, spec.top_k)

    def _forward(
        self,
        step: Documents,
        passed: list[list[_Passed]] | None = None,
        balance: RouterBalance | None = None,
    ) -> Tensor:
        """Returns the residual [T, H] behind the last layer; notes each layer in `passed`, if a gradient is wanted."""
        keeps = passed is not None and self.options.retain
        dtype = torch.float32 if self.options.exact else self.options.residuals
        with torch.no_grad():
            rows = self._embedding[step.ids].to(self._device).float()
            x: Tensor = self.model.part(self._backend(step.together, rows), None, 0, 0)
        for layer in range(self.model.spec.layers):
            outs, noted = [], list[_Passed]()
            for group in step.groups(self.options.max_rows):
                entered = x[group.rows].detach().requires_grad_(keeps)
                backend = self._backend(group, entered, layer)
                with torch.set_grad_enabled(keeps):
                    out = self.model.layer(backend, entered, layer)
                outs.append(out.detach())
                _require_finite(outs[-1], f"the output of layer {layer}")
                if balance is not None:
                    balance.add(backend.router_logits)
                chosen = tuple(ids for ids, _ in backend.routings)
                if keeps:
                    noted.append(_Passed(group, entered, chosen, out, backend.router_logits))
                elif passed is not None:
                    noted.append(_Passed(group, entered.to(dtype).cpu(), chosen))
            x = _joined(outs)
            if passed is not None:
                passed.append(noted)
        return x

    def _backward(
        self,
        layer: int,
        passed: list[_Passed],
        dout: Tensor,
        balance: RouterBalance | None = None,
    ) -> Tensor:
        """Returns the gradient [T, H] of a layer's input from that of its output, and adds to those of its factors."""
        own = [each for each in self.factors.values() if each.layer == layer]
        dense = [each for each in own if isinstance(each, DenseFactors)]
        dx = []
        while passed:  # what is done is forgotten
            one = passed.pop(0)
            dx.append(self._backward_group(layer, one, dout[one.group.rows], dense, balance))
            _require_finite(dx[-1], f"the gradient of layer {layer}")
        for each in own:
            for gradient in (each.gradient_a, each.gradient_b):
                _require_finite(gradient, f"the gradient of {each.name}")
        return _joined(dx)

    def _backward_group(
        self,
        layer: int,
        passed: _Passed,
        dout: Tensor,
        dense: Sequence[DenseFactors],
        balance: RouterBalance | None,
    ) -> Tensor:
        """Does what `_backward` does for one group of documents; `dense` are the layer's factors of dense matrices."""
        x, out, logits = passed.x, passed.out, passed.logits
        if out is None:
            x = x.to(self._device).float().requires_grad_()
            backend = self._backend(passed.group, x, layer, passed.chosen, again=True)
            with torch.enable_grad():
                out = self.model.layer(backend, x, layer)
            logits = backend.router_logits
        outs, gradients = [out], [dout]
        if balance is not None and logits:
            with torch.enable_grad():
                outs.append(balance.share(logits))
            gradients.append(torch.tensor(self.options.balance, device=dout.device))
        leaves = [leaf for each in dense for leaf in (each.a, each.b)]
        dx, *found = torch.autograd.grad(
            outs, [x, *leaves], gradients, allow_unused=True, materialize_grads=True
        )
        for factors, da, db in zip(dense, found[::2], found[1::2], strict=True):
            factors.gradient_a += da
            factors.gradient_b += db
        return dx

    def _head(self, x: Tensor) -> Tensor:
        """Returns the logits [N, vocab] of rows [N, H] of the residual behind the last layer."""
        last = self.model.spec.layers
        logits: Tensor = self.model.part(
            DifferentiableBackend(self._weights, StepInputs(x, (), ())), x, last, last
        )
        return logits

    def _backend(
        self,
        group: DocumentGroup,
        x: Tensor,
        layer: int = 0,
        chosen: tuple[Tensor, ...] | None = None,
        *,
        again: bool = False,
    ) -> DifferentiableBackend:
        """A backend that runs one layer, at once; `again`: for its gradients alone."""
        self.dropout.first = group.first
        inputs = StepInputs(x, group.parts, (), routed=self._routed[layer])
        return DifferentiableBackend(self._weights, inputs, chosen, again=again)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all groups of a step, one behind the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _require_finite(x: Tensor, what: str) -> None:
    """Checks that all numbers are finite.

    Raises:
        NotFinite: one is NaN or infinite.
    """
    if not bool(torch.isfinite(x).all()):
        raise NotFinite(what)
