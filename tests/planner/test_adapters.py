"""Plans with a GPU and adapters: their room is counted, and experts that they change stay in main memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from shapes import shape

from ktcli.errors import UsageError
from ktcli.hardware.profile import read_machine
from ktcli.models import Model
from ktcli.ops.tensors import Role
from ktcli.planner.host import Host, host_of
from ktcli.planner.memory import AdapterRoom, ProductRoom, Use
from ktcli.planner.placement import place
from ktcli.planner.plan import DevicePlan, Plan, Request
from ktcli.planner.prefill import NEVER

NAMES = ["qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"]
MACHINES = ["desktop-24gb-gpu", "workstation-2x4090", "cloud-h200-128gb"]
MIB = 1 << 20


def room(model: Model, ranks: int, *, experts: int = 0, most: int = 1) -> AdapterRoom:
    """For adapters of all products of layers that are not routed experts."""
    products = tuple(
        ProductRoom(t.name, t.layer, ranks, t.k, t.n, t.count > 1, 1, t.count)
        for t in model.tensors
        if t.role not in (Role.EXPERTS, Role.TABLE) and t.n > 1 and t.layer is not None
    )
    size = sum(each.size_bytes for each in products) // 2
    return AdapterRoom(most, ranks, most * (size + experts), size, experts, products)


def planned(model: Model, host: Host, adapters: AdapterRoom | None, **asked: object) -> Plan:
    return place(model, host, Request(use=Use(adapters=adapters), device="cuda", **asked))  # type: ignore[arg-type]


def used(plan: Plan) -> DevicePlan:
    assert plan.device is not None, plan.notes
    return plan.device


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", NAMES)
def test_every_byte_is_in_the_plan(name: str, machine: str) -> None:
    """Of the GPUs, where fewer experts find room, and of main memory, where all adapters lie twice."""
    model, host = shape(name), host_of(read_machine(Path(machine)), torch=True)
    adapters = room(model, 16, most=4)
    asked = {"context": 4096, "gpu_experts": 2, "prefill_threshold": NEVER}
    plain, made = (planned(model, host, each, **asked) for each in (None, adapters))
    before, after = used(plain), used(made)
    assert after.need.weights == before.need.weights + adapters.device_bytes
    assert after.n_experts == before.n_experts
    more = adapters.beside_bytes(model.spec, 1)
    assert more > 4 * adapters.device_bytes
    assert made.need_bytes == plain.need_bytes + more
    lines = {line.where: line.size_bytes for line in made.lines if line.part == "adapters"}
    assert lines.pop("GPU") == adapters.device_bytes and list(lines.values()) == [more]
    on_gpu = sum(line.size_bytes for line in made.lines if line.where == "GPU")
    assert on_gpu == after.need.total
    assert made.speed.decode < plain.speed.decode


def test_the_other_experts_give_way() -> None:
    model, host = shape(NAMES[0]), host_of(read_machine(Path("laptop-8gb-gpu")), torch=True)
    plain, made = (
        used(planned(model, host, each, context=4096)) for each in (None, room(model, 64))
    )
    assert 0 < sum(made.n_experts) < sum(plain.n_experts)
    assert made.need.total <= host.gpus[0].free_bytes


@pytest.mark.parametrize("machine", MACHINES)
def test_experts_that_an_adapter_changes_stay_in_main_memory(machine: str) -> None:
    model, host = shape(NAMES[0]), host_of(read_machine(Path(machine)), torch=True)
    adapters = room(model, 8, experts=600 * MIB)
    made = planned(model, host, adapters, context=4096)
    device = used(made)
    assert not device.mask.any() and device.prefill_threshold == NEVER and not device.need.stream
    assert any("changes routed experts" in reason for reason in device.reasons)
    without = planned(model, host, replace(adapters, experts_bytes=0), context=4096, gpu_experts=0)
    assert used(without).times.expert_s < device.times.expert_s


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpu_experts": 3}, "leave out --gpu-experts"),
        ({"gpu_experts": "hot"}, "leave out --gpu-experts"),
        ({"prefill_threshold": 900}, "--prefill-threshold"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, object], said: str) -> None:
    model, host = shape(NAMES[0]), host_of(read_machine(Path(MACHINES[0])), torch=True)
    with pytest.raises(UsageError, match="changes routed experts") as error:
        planned(model, host, room(model, 8, experts=MIB), **asked)
    assert said in (error.value.hint or "")


def test_a_choice_of_the_machine_counts_the_adapter() -> None:
    """With `auto` an adapter no longer means the CPU."""
    model, host = shape(NAMES[1]), host_of(read_machine(Path(MACHINES[0])), torch=True)
    use = Use(adapters=room(model, 8))
    assert place(model, host, Request(use=use, device="auto")).device is not None
