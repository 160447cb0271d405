"""Placement rules: what they match, what they decide of a plan, and which are refused.

The judge of random files is `Judged`: it reads rules with regular expressions, part by part, and adds up the bytes of
each place tensor by tensor, by the sizes of the pack's files and the rule of plain rows on GPUs.
"""

import itertools
import random
import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from shapes import shape

from ktcli.errors import NotEnoughMemory, UsageError
from ktcli.hardware.profile import read_machine
from ktcli.models.model import Model
from ktcli.ops.part import ModelPart
from ktcli.ops.tensors import Role
from ktcli.planner.constraints import constraints_of
from ktcli.planner.host import Host, host_of
from ktcli.planner.partnames import PartNames
from ktcli.planner.placement import place
from ktcli.planner.plan import Plan, Request
from ktcli.planner.planrules import rules_of
from ktcli.planner.rules import matches, parse_rules, rules_text
from ktcli.planner.slices import slices_of
from ktcli.planner.stack import bytes_on_device
from ktcli.weights.recipe import Recipe, stored_bytes

MODELS = (
    "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "deepseek-v2-lite", "kimi-k2", "gpt-oss-20b", "gpt-oss-120b",
    "glm-4.5-air", "mixtral-8x7b", "qwen3-next-80b-a3b",
)  # fmt: skip
MACHINES = (
    "workstation-2x4090", "server-8xl20-1tb", "xeon-2x36-2x4090-1tb", "xeon-2x32-512gb", "laptop-8gb-gpu",
)  # fmt: skip
PER_PAIR = 4  # 10 models x 5 machines x 4 = 200 files


@cache
def host(name: str) -> Host:
    return host_of(read_machine(Path(name)), torch=True)


def text(*rules: tuple[str, str], key: str = "place") -> str:
    return "\n".join(f'[[rule]]\nmatch = "{match}"\n{key} = "{value}"' for match, value in rules)


def planned(model: str, machine: str, *rules: tuple[str, str], **asked: object) -> Plan:
    return place(shape(model), host(machine), Request(rules=parse_rules(text(*rules)), **asked))


# --- patterns ---------------------------------------------------------------------------------------


def test_globs_match_as_regular_expressions_do():
    """All globs of up to five characters over two letters and the star, on all words of up to five."""
    words = ["".join(w) for n in range(6) for w in itertools.product("ab", repeat=n)]
    globs = ["".join(g) for n in range(1, 6) for g in itertools.product("ab*", repeat=n)]
    for glob in globs:
        pattern = re.compile(glob.replace("*", ".*"))
        assert [matches(glob, word) for word in words] == [
            bool(pattern.fullmatch(word)) for word in words
        ], glob


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("x = 1", "unknown key 'x'"),
        ("[[rule]]\nmatch = 'x'\nplaces = 'cpu'", "unknown key 'places'"),
        ("[[rule]]\nplace = 'cpu'", "has no match"),
        ("[[rule]]\nmatch = 'x'", "asks for nothing"),
        ("[[rule]]\nmatch = 3\nplace = 'cpu'", "match must be a text"),
        ("rule = 3", "begins with"),
        ("rule = [3]", "begins with"),
        ("[[rule]", "is not a file of placement rules"),
        ("x = " + "[" * 5000, "is not a file of placement rules"),
        (text(("layers.9-3.experts", "cpu")), "the range 9-3 ends before it begins"),
        (text(("layers.0-9-12.experts", "cpu")), "is not a pattern"),
        (text(("layers.0.experts.1.2", "cpu")), "is not a pattern"),
        (text(("(a+)+$", "cpu")), "is not a pattern"),
        (text(("", "cpu")), "must have 1 to"),
        (text(("x", "disk")), "kt cannot keep parts of a model on disk yet"),
        (text(("x", "tpu:0")), "'tpu:0' is not a place"),
        (text(("x", "cuda:-1")), "'cuda:-1' is not a place"),
        (text(("x", "cuda")), "'cuda' is not a place"),
        (text(("x", "int5"), key="format"), "'int5' is not a number format"),
        (text(("*", "sse"), key="kernel"), "'sse' is not a row of kernels"),
        (text(*[("x", "cpu")] * 5000), "has 5,000 rules, and kt reads up to 2,048"),
    ],
)  # fmt: skip
def test_what_is_not_a_rule_is_refused_in_a_sentence(toml: str, words: str):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse_rules(toml)


@pytest.mark.parametrize(
    ("rules", "words", "hint"),
    [
        ([("layers.*.expert", "cpu")], 'rule 1 ("layers.*.expert") matches no part', "layers.*.experts?"),
        ([("attention", "cpu")], "matches no part", "layers.*.attention?"),
        ([("embeding", "cpu")], "matches no part", "embedding?"),
        ([("layers.5.shared_experts", "cpu")], "matches no part", "layers."),
        ([("layers.48", "cpu")], "names layer 48, but the model has layers 0-47", ""),
        ([("layers.3.experts.0-128", "cpu")], "names expert 128, but the model has experts 0-127", ""),
        ([("embedding", "cuda:0")], "kt keeps the embedding in main memory", "place = "),
        ([("layers.3.attention", "node:0")], "only routed experts can be on one node", ""),
        ([("layers.3.router", "cuda:0"), ("layers.3.experts", "cuda:1")],
         "layers.3.experts on cuda:1: layers.3.router is on cuda:0", "the GPU that has the layer"),
        ([("layers.3.attention", "cuda:0"), ("layers.3.router", "cuda:1")], "together", "one GPU"),
        ([("layers.3.attention", "cpu"), ("layers.4.experts", "cuda:0")],
         "attention is computed where the layer's cache is", '"layers.N.experts" can be on cpu beside a GPU'),
        ([("layers.3.router", "cpu"), ("layers.4.experts", "cuda:0")], "the experts of a token are chosen on", "*"),
        ([("output_head", "cpu"), ("layers.4.experts", "cuda:0")], "logits are made on the GPU", "*"),
        ([("layers.0-3", "cuda:0"), ("layers.5", "cuda:1"), ("layers.8", "cuda:0")],
         "layers 3 and 8 on cuda:0, but layer 5 between them", "consecutive"),
        ([("layers.3.experts.0-9", "node:0")], "must be on the same node", ""),
        ([("layers.3", "cuda:2")], "there is no GPU cuda:2", "cuda:0, cuda:1"),
        ([("layers.3.experts", "node:0")], "has no threads of its own", ""),
    ],
)  # fmt: skip
def test_what_kt_cannot_place_is_refused_before_anything_is_loaded(
    rules: list[tuple[str, str]], words: str, hint: str
):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        planned("qwen3-30b-a3b", "workstation-2x4090", *rules)
    assert hint in caught.value.hint


def test_layers_that_share_chosen_positions_stay_together():
    model = shape("glm-5.2")
    shared = next(n for n in range(1, model.spec.layers) if n not in model.borders)
    rules = parse_rules(text((f"layers.{shared - 1}", "cuda:0"), (f"layers.{shared}", "cuda:1")))
    with pytest.raises(UsageError, match="attends to positions that layer"):
        constraints_of(rules, model, Recipe())


def test_formats_are_those_of_the_conversion():
    model, recipe = shape("qwen3-30b-a3b"), Recipe.named("int4-mixed", "int8")
    for match, fmt in (
        ("layers.*.experts", "int4"),
        ("layers.*.attention", "int8"),
        ("embedding", "bf16"),
    ):
        constraints_of(parse_rules(text((match, fmt), key="format")), model, recipe)
    for match, fmt, hint in (
        ("layers.*.experts", "int8", "kt convert MODEL --experts int8"),
        ("layers.0.attention", "bf16", "kt convert MODEL --dense bf16"),
        ("layers.*.norms", "int8", "kt always stores norms as f32"),
    ):
        with pytest.raises(UsageError, match="is stored as") as caught:
            constraints_of(parse_rules(text((match, fmt), key="format")), model, recipe)
        assert hint in caught.value.hint


def test_experts_that_do_not_fit_are_refused_with_both_figures():
    with pytest.raises(NotEnoughMemory, match="rules place on cuda:0"):
        planned("qwen3-235b-a22b", "workstation-2x4090", ("layers.*.experts", "cuda:0"))


def test_the_first_rule_wins_and_that_is_said():
    made = planned(
        "qwen3-30b-a3b", "workstation-2x4090",
        ("layers.0-9.experts", "cpu"), ("layers.*.experts", "cuda:1"), ("layers.3.experts", "cuda:0"),
    )  # fmt: skip
    assert made.device is not None and made.device.n_experts == (0,) * 10 + (128,) * 38
    assert made.notes[:2] == (
        "placement rule 3: earlier rules name all of the parts that match; the first rule wins",
        "placement rule 2: earlier rules name some parts that match; the first rule wins",
    )
    whole, *each = made.costs
    assert whole.option == "--placement" and len(each) == 3 and each[2].own == each[2].forced
    assert whole.device_bytes is not None and whole.device_bytes < 0 < (whole.memory_bytes or 0)


def test_as_many_rules_as_a_file_can_have():
    rules = parse_rules(text(*[("layers.*.experts", "cpu")] * 2048))
    found = constraints_of(rules, shape("kimi-k2"), Recipe())
    assert (found.experts == 0).all()


# --- rows of kernels ----------------------------------------------------------------------------------


def test_rows_of_kernels_are_those_of_single_parts():
    """Beside that of the whole model; the first rule wins."""
    rules = parse_rules(
        text(("layers.3.attention", "avx2"), ("layers.4.experts", "portable"), ("*", "avx512"), ("embedding", "avx2"),
             key="kernel")
    )  # fmt: skip
    made = place(shape("qwen3-30b-a3b"), host("xeon-2x32-512gb"), Request(rules=rules))
    assert rules.kernel == "avx512"
    assert made.rows == {(3, ModelPart.ATTENTION): "avx2", (4, ModelPart.EXPERTS): "portable"}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("layers.3.attention", "avx2")], "but layers.3.attention is on a GPU in this plan"),
        ([("layers.3.experts.0-4", "avx2")], "the experts of a layer use one row of kernels"),
        ([("layers.3.atention", "avx2")], "matches no part"),
    ],
)
def test_rows_of_kernels_that_cannot_be_are_refused(rules: list[tuple[str, str]], words: str):
    with pytest.raises(UsageError, match=re.escape(words)):
        place(
            shape("qwen3-30b-a3b"), host("workstation-2x4090"),
            Request(rules=parse_rules(text(*rules, key="kernel")), device="cuda"),
        )  # fmt: skip


def test_a_row_of_kernels_that_the_cpu_lacks_is_refused():
    rules = parse_rules(text(("layers.3.attention", "amx"), key="kernel"))
    with pytest.raises(UsageError, match="the row amx, which this CPU does not run") as caught:
        rules.require_rows(("avx2", "portable"))
    assert caught.value.hint == "rows that it runs: avx2, portable"
    rules.require_rows(())


# --- random files -----------------------------------------------------------------------------------


class Judged:
    """The place of every part of a model under rules, found one by one."""

    def __init__(self, rules: list[tuple[str, str]]) -> None:
        self._patterns = [(re.compile(self._expression(match)), value) for match, value in rules]

    @staticmethod
    def _expression(match: str) -> str:
        components = []
        for each in match.split("."):
            if each[0].isdigit():
                ranges = (part.partition("-") for part in each.split(","))
                numbers = (range(int(a), int(b or a) + 1) for a, _, b in ranges)
                components.append("(" + "|".join(str(n) for some in numbers for n in some) + ")")
            else:
                components.append(each.replace("*", "[^.]*"))
        return r"\.".join(components) + r"(\..*)?"

    def place(self, name: str) -> str | None:
        return next((v for pattern, v in self._patterns if pattern.fullmatch(name)), None)


def random_rules(draw: random.Random, model: Model, machine: Host) -> list[tuple[str, str]]:
    """Rules that mostly can be: layers on GPUs in some order, experts anywhere, and now and then nonsense."""
    layers, experts = model.spec.layers, model.spec.experts
    gpus = [gpu.index for gpu in machine.gpus]
    nodes = [node.id for node in machine.nodes]
    found = []
    for _ in range(draw.randrange(4)):
        a, b = sorted((draw.randrange(layers), draw.randrange(layers)))
        ids = draw.choice(["", "", f".0-{draw.randrange(experts)}", f".{draw.randrange(experts)}"])
        places = ["cpu"] * 3 + [f"cuda:{n}" for n in gpus[:2]]
        if not ids and nodes:
            places += [f"node:{n}" for n in nodes]
        found.append((f"layers.{a}-{b}.experts{ids}", draw.choice(places)))
    words = [w for w in ("shared_experts", "dense_mlp") if w in PartNames.of(model).layered]
    if words and draw.random() < 0.4:
        found.append((f"layers.{draw.choice(['*', '0-9'])}.{draw.choice(words)}", "cpu"))
    if gpus and draw.random() < 0.7:
        order = draw.sample(gpus, draw.randint(1, min(3, len(gpus))))
        ends = sorted(draw.sample(range(1, layers), len(order) - 1))
        for gpu, (a, b) in zip(order, itertools.pairwise([0, *ends, layers]), strict=True):
            word = draw.choice(["attention", "norms", "router", "kv_cache", ""])
            found.append((f"layers.{a}-{b - 1}{'.' * bool(word)}{word}", f"cuda:{gpu}"))
    if draw.random() < 0.2:
        found.append(
            (
                draw.choice(["*", "layers", "embedding", "output_head"]),
                draw.choice(["cpu", "cuda:0"]),
            )
        )
    return found


def require_bytes(model: Model, made: Plan, rules: list[tuple[str, str]]) -> None:
    """Every part is where the first rule says, each place's bytes are the sum of what is there, and fit."""
    judged, recipe, device = Judged(rules), Recipe(), made.device
    gpu_of = {n: each.gpu.index for each in device.segments for n in each.layers} if device else {}
    moe = sorted({t.layer for t in model.tensors if t.role is Role.EXPERTS})
    resident = {n: device.resident[i] if device else () for i, n in enumerate(moe)}
    said = {
        n: [judged.place(f"layers.{n}.experts.{e}") for e in range(model.spec.experts)] for n in moe
    }
    for n, places in said.items():
        for e, place_of in enumerate(places):
            assert place_of is None or (e in resident[n]) == place_of.startswith("cuda"), (n, e)
            assert not (place_of or "").startswith("cuda") or gpu_of[n] == int(place_of[5:])
    weights: defaultdict[str, int] = defaultdict(int)
    shares = [team.threads for team in made.host.teams]
    for tensor in model.tensors:
        size, here = stored_bytes(tensor, recipe), tensor.count
        own = shares
        if tensor.role is Role.EXPERTS:
            there = len(resident[tensor.layer])
            weights[f"experts {gpu_of.get(tensor.layer)}"] += size // tensor.count * there
            here -= there
            nodes = {p for p in said[tensor.layer] if p and p.startswith("node")}
            own = [n if not nodes or f"node:{team.memory[0]}" in nodes else 0
                   for n, team in zip(shares, made.host.teams, strict=True)]  # fmt: skip
        elif device is not None and tensor.role is not Role.TABLE:
            gpu = device.segments[-1].gpu.index if tensor.layer is None else gpu_of[tensor.layer]
            is_mlp = tensor.part in (ModelPart.SHARED, ModelPart.DENSE_MLP)
            word = tensor.part.value.lower().replace(" ", "_")
            if is_mlp and judged.place(f"layers.{tensor.layer}.{word}") == "cpu":
                assert (tensor.layer, tensor.part) in device.apart
                pieces = slices_of(tensor, recipe, own) if shares else ()
                weights["memory"] += sum(each.size_bytes for each in pieces) or size
                continue
            assert (tensor.layer, tensor.part) not in device.apart
            weights[f"weights {gpu}"] += bytes_on_device(tensor, recipe)
            if not tensor.is_expert_bias or len(resident[tensor.layer]) == model.spec.experts:
                continue
        pieces = slices_of(replace(tensor, count=here), recipe, own) if here and shares else ()
        weights["memory"] += sum(each.size_bytes for each in pieces) or size // tensor.count * here
    for each in device.segments if device else ():
        assert each.need.weights == weights[f"weights {each.gpu.index}"]
        assert each.need.experts == weights[f"experts {each.gpu.index}"]
        assert each.need.total <= each.budget_bytes <= each.gpu.free_bytes
    others = ("KV cache", "attention state", "scratch", "process, margin", "pinned buffers")
    held = [
        line.size_bytes for line in made.lines if line.where != "GPU" and line.part not in others
    ]
    assert sum(held) == weights["memory"]
    assert sum(line.size_bytes for line in made.lines if line.where != "GPU") == made.need_bytes
    assert not made.nodes or 0 <= sum(n.need_bytes for n in made.nodes) - made.need_bytes <= 64
    assert made.fits == (
        made.need_bytes <= made.host.available_bytes and all(n.fits for n in made.nodes)
    )


@pytest.mark.each_once
@pytest.mark.rotates(4)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_random_rules_are_followed_to_the_byte_or_refused(name: str, machine: str):
    model, draw = shape(name), random.Random(f"{name} {machine}")
    made = refused = 0
    while made < PER_PAIR:
        rules = random_rules(draw, model, host(machine))
        try:
            plan = place(model, host(machine), Request(rules=parse_rules(text(*rules))))
        except (UsageError, NotEnoughMemory) as error:
            refused += 1
            assert str(error) and refused < 100
            continue
        made += 1
        require_bytes(model, plan, rules)


# --- parts of layers on the CPU -----------------------------------------------------------------------


def test_shared_experts_on_the_cpu_beside_experts_on_a_gpu():
    """As in docs/placement.md: the layers stay on GPUs, what the CPU takes is taken off them, and costs time."""
    rules = (("layers.3-7.experts", "cuda:0"), ("layers.*.shared_experts", "cpu"))
    kept = ("layers.*.experts", "cpu")
    made = planned("deepseek-v3", "server-8xl20-1tb", *rules, kept)
    without = planned("deepseek-v3", "server-8xl20-1tb", rules[0], kept)
    model, recipe = shape("deepseek-v3"), Recipe()
    shared = [t for t in model.tensors if t.part is ModelPart.SHARED]
    device, other = made.device, without.device
    assert device is not None and other is not None
    assert device.apart == {(n, ModelPart.SHARED) for n in range(3, 61)}
    assert device.n_experts[:5] == (256,) * 5 and sum(device.n_experts) == 5 * 256
    taken = sum(bytes_on_device(tensor, recipe) for tensor in shared)
    assert other.need.weights - device.need.weights == taken
    (line,) = (each for each in made.lines if each.part == "shared experts")
    assert line.where != "GPU" and "by rule, in 58 layers" in line.reason and line.decode_s > 0
    assert made.speed.decode < without.speed.decode and made.speed.prefill < without.speed.prefill
    assert not device.streams and device.depths == ((0, 0),)
    copy = parse_rules(rules_text(rules_of(made, model), "a plan"))
    again = place(model, host("server-8xl20-1tb"), Request(rules=copy))
    assert again.device is not None and again.device.apart == device.apart
    assert (again.speed, again.need_bytes) == (made.speed, made.need_bytes)


def test_some_of_a_parts_layers_on_the_cpu_have_two_lines():
    made = planned(
        "deepseek-v3", "server-8xl20-1tb", ("layers.3-31.shared_experts", "cpu"), ("layers.*.kv_cache", "cuda:0")
    )  # fmt: skip
    here, there = (
        next(each for each in made.lines if each.part == "shared experts" and (each.where == "GPU") == on_gpu)
        for on_gpu in (False, True)
    )  # fmt: skip
    assert here.size_bytes == there.size_bytes and 0 < there.decode_s < here.decode_s


def test_no_rule_means_the_whole_model_where_only_mlps_are_on_the_cpu():
    made = planned("deepseek-v2-lite", "workstation-2x4090", ("layers.*.shared_experts", "cpu"))
    assert made.device is not None and len(made.device.apart) == 26
    whole = planned("deepseek-v2-lite", "workstation-2x4090", ("layers.*.attention", "cpu"))
    assert whole.device is None


def test_streaming_beside_mlps_of_the_cpu_is_refused():
    with pytest.raises(UsageError, match="keep the shared experts of layer 3 in main memory"):
        planned(
            "deepseek-v3", "server-8xl20-1tb", ("layers.*.shared_experts", "cpu"), ("layers.0", "cuda:0"),
            prefill_threshold=512,
        )  # fmt: skip


# --- rules that copy a plan -------------------------------------------------------------------------


@pytest.mark.each_once
@pytest.mark.rotates(4)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", MODELS)
def test_rules_that_copy_a_plan_give_the_same_plan(name: str, machine: str):
    model = shape(name)
    own = place(model, host(machine), Request())
    read = parse_rules(rules_text(rules_of(own, model), "a plan"))
    again = place(model, host(machine), Request(rules=read))
    assert (again.device is None) == (own.device is None)
    assert again.need_bytes == own.need_bytes and again.nodes == own.nodes
    assert again.context == own.context and again.depths == own.depths
    assert again.speed == own.speed
    if own.device is not None and again.device is not None:
        same = ("segments", "resident", "prefill_threshold", "chunk", "stream_experts", "hit_rate")
        assert [getattr(again.device, each) for each in same] == [
            getattr(own.device, each) for each in same
        ]
    assert rules_of(again, model) == rules_of(own, model)


def test_rules_that_copy_nodes_give_the_same_plan():
    model, machine = shape("deepseek-v3"), host("xeon-2x32-512gb")
    own = planned(
        "deepseek-v3",
        "xeon-2x32-512gb",
        ("layers.3-9.experts", "node:1"),
        ("layers.12.experts", "node:0"),
    )
    assert own.experts_on == {**dict.fromkeys(range(3, 10), (1,)), 12: (0,)}
    again = place(model, machine, Request(rules=rules_of(own, model)))
    assert (again.experts_on, again.nodes, again.speed) == (own.experts_on, own.nodes, own.speed)
    free = place(model, machine, Request())
    more = [a.need_bytes - b.need_bytes for a, b in zip(own.nodes, free.nodes, strict=True)]
    assert more[1] > 0 > more[0] and own.speed.decode < free.speed.decode


def test_what_no_rule_names_is_the_plans():
    """Layers between two that rules place on GPUs go to either, and experts that no rule names fill what is left."""
    made = planned(
        "qwen3-235b-a22b", "workstation-2x4090", ("layers.0", "cuda:0"), ("layers.93", "cuda:1")
    )
    free = place(shape("qwen3-235b-a22b"), host("workstation-2x4090"), Request(gpus=(0, 1)))
    assert made.device is not None and free.device is not None
    assert made.device.gpus == free.device.gpus
    assert sum(made.device.n_experts) > 0.9 * sum(free.device.n_experts)
    front = planned(
        "qwen3-235b-a22b", "workstation-2x4090", ("layers.0-1.experts", "cpu"), gpu_experts="front"
    )
    assert front.device is not None and front.device.n_experts[:3] == (0, 0, 128)


def test_more_layers_on_another_gpu_are_more_bytes_there():
    at = [planned("qwen3-30b-a3b", "workstation-2x4090", (f"layers.0-{n}", "cuda:0"), (f"layers.{n + 1}-47", "cuda:1"))
          for n in (7, 23, 39)]  # fmt: skip
    needs = np.array(
        [[each.need.total for each in made.device.segments] for made in at if made.device]
    )
    assert (
        needs.shape == (3, 2)
        and (np.diff(needs[:, 0]) > 0).all()
        and (np.diff(needs[:, 1]) < 0).all()
    )


def test_a_line_that_no_rule_needs_is_refused():
    with pytest.raises(UsageError, match="a line has more than"):
        parse_rules("a" + ".a" * 250_000 + " = 1")
