"""What of a model lies in main memory beside a device: experts, and the parts that rules keep there."""

from __future__ import annotations

from collections.abc import Sequence

from ktcli.engine.arenas import refusals
from ktcli.engine.device.blocks import HostBlock, host_blocks
from ktcli.engine.device.experts import LayerWeights
from ktcli.engine.device.placement import Placement
from ktcli.engine.device.segments import Segment
from ktcli.engine.device.weights import DeviceModel
from ktcli.engine.loader import Progress, Tensors, TensorSource, expert_rows, load
from ktcli.models import Model
from ktcli.native import Pool
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.records import dataclass
from ktcli.weights.recipe import Recipe, stored_bytes


@dataclass(frozen=True, slots=True)
class HostParts:
    """The parts of a model in main memory.

    Attributes:
        layers: the experts of each layer that has some; None: all are on the device.
        blocks: the MLPs.
        size_bytes: the bytes of their weights, with the biases that are copied back from the device.
        warnings: what the system refused for their memory.
    """

    layers: list[LayerWeights | None]
    blocks: list[HostBlock]
    size_bytes: int
    warnings: tuple[str, ...]


def load_host(
    model: Model,
    recipe: Recipe,
    source: TensorSource,
    pool: Pool,
    placement: Placement,
    on_device: DeviceModel,
    segments: Sequence[Segment],
    progress: Progress | None,
) -> HostParts:
    """Loads the experts and MLPs that a placement leaves in main memory; returns them with their bytes and the warnings
    about their memory.

    Args:
        on_device: the parts on the devices, among them the biases of the experts that are loaded here.
        progress: called with the bytes loaded so far and the bytes in all.
    """
    mask, apart = placement.mask, placement.apart
    loaded = load(
        model,
        recipe,
        source,
        pool,
        progress,
        skip=mask,
        only=lambda tensor: tensor.role is Role.EXPERTS or tensor.layer_part in apart,
        experts_on=placement.experts_on,
    )
    found = _expert_layers(model, loaded, placement, on_device)
    layers = [None if mask[i].all() else each for i, each in enumerate(found)]
    blocks = host_blocks(
        model,
        apart,
        loaded.by_name,
        on_device.weights.vectors,
        {n: each.stream for each in segments for n in each.layers},
        placement.rows,
    )
    biases = sum(layer.extras.bias_bytes for layer in layers if layer)  # copied back
    warnings = tuple(refusals(pool, loaded.unbound))
    return HostParts(layers, blocks, loaded.size_bytes + biases, warnings)


def _expert_layers(
    model: Model, loaded: Tensors, placement: Placement, on_device: DeviceModel
) -> list[LayerWeights]:
    """The experts of each layer that has some, as they lie in main memory."""
    # In each layer gate_up comes before down.
    names = [tensor.name for tensor in model.tensors if tensor.role is Role.EXPERTS]
    slices = [(name, each) for name in names if isinstance(each := loaded.by_name[name], tuple)]
    pairs = zip(slices[::2], slices[1::2], on_device.stacks, strict=True)
    of_experts = [placement.rows.get((n, ModelPart.EXPERTS)) for n in expert_rows(model)]
    return [
        LayerWeights(gate_up, down, stack.extras, names=(wide, narrow), row=row)
        for ((wide, gate_up), (narrow, down), stack), row in zip(pairs, of_experts, strict=True)
    ]


def one_count(
    progress: Progress | None, model: Model, recipe: Recipe
) -> tuple[Progress, Progress] | tuple[None, None]:
    """Returns the progress functions of two loads, the first and the second, which together read every tensor of the
    model once. Both call `progress` with the bytes that the loads have done together and the bytes of the whole model.
    (None, None) if `progress` is None.
    """
    if progress is None:
        return None, None
    total = sum(stored_bytes(tensor, recipe) for tensor in model.tensors)
    return (
        lambda done, of: progress(done, total),
        lambda done, of: progress(total - of + done, total),
    )
