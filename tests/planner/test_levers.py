"""What a plan advises: what an exhaustive search finds is named, and each figure is that of the plan it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ktcli.hardware.profile import read_machine, shipped
from ktcli.main import main
from ktcli.models import build
from ktcli.planner.host import Host, host_of
from ktcli.planner.placement import advised, place
from ktcli.planner.plan import Lever, Plan, Request
from ktcli.planner.spec import weight_bytes
from ktcli.store import catalog
from ktcli.weights.formats import FORMATS, losses
from ktcli.weights.recipe import Recipe, automatic

MODELS = [name for name in catalog.names() if name != "kt-mini"]
WHERE = sorted(shipped())
TWO_SOCKETS = "xeon-2x36-4090-512gb"
SAMPLE = {"kimi-k2": TWO_SOCKETS, "qwen3-30b-a3b": "laptop-16gb", "qwen3-8b": "laptop-16gb"}


def asked(name: str) -> Request:
    profile = catalog.get(name)
    return Request(Recipe.named(profile.experts, profile.dense))


def machine(name: str) -> Host:
    return host_of(read_machine(Path(name)), torch=True)


def plan(name: str, where: str, request: Request | None = None) -> Plan:
    return place(build(catalog.get(name).config), machine(where), request or asked(name))


def best_that_fits(name: str, where: str) -> tuple[str, Plan] | None:
    """The format that loses least of those that fit, with its plan."""
    request, model, host = asked(name), build(catalog.get(name).config), machine(where)
    routed = model.spec.experts > 0
    everywhere = host.available_bytes + sum(gpu.vram_bytes for gpu in host.gpus)
    for loss in losses(experts=routed):
        own = request.recipe
        pair = (loss.format, own.dense.name) if routed else (own.experts_name, loss.format)
        recipe = own.like(*pair)
        if weight_bytes(model, recipe) > everywhere:
            continue
        made = place(model, host, replace(request, recipe=recipe))
        if made.fits:
            return loss.format, made
    return None


def named(levers: tuple[Lever, ...]) -> dict[str, Plan]:
    """The plans of the levers about one format, by its name."""
    words = [(lever.options.split(), lever.plan) for lever in levers]
    return {
        said[1]: plan
        for said, plan in words
        if plan is not None and len(said) == 2 and said[0] in ("--experts", "--dense")
    }


@pytest.mark.parametrize(
    "name", [pytest.param("kimi-k2", marks=pytest.mark.thorough), "qwen3-30b-a3b", "qwen3-8b"]
)
def test_the_format_that_loses_least_is_named(name: str) -> None:
    check(name, SAMPLE[name])


@pytest.mark.thorough
@pytest.mark.rotates(4)
@pytest.mark.parametrize("where", WHERE)
def test_the_format_that_loses_least_is_named_of_every_model(where: str) -> None:
    """Every model on two machines, every machine with a fourth of the models."""
    for at, name in enumerate(MODELS):
        if (at + WHERE.index(where)) % 4 == 0:
            check(name, where)


def check(name: str, where: str) -> None:
    made, best = plan(name, where), best_that_fits(name, where)
    if not made.fits:
        found = named(made.advice)
        assert bool(found) == bool(best)
        if best:
            assert next(iter(found)) == best[0]
            assert_same(found[best[0]], best[1])
        return
    model = build(catalog.get(name).config)
    better = advised(model, machine(where), asked(name), made)
    routed = model.spec.experts > 0
    own = made.recipe.experts_name if routed else made.recipe.dense.name
    lost = {loss.format: loss.nats for loss in losses(experts=routed)}
    found = named(better.advice)
    if found:
        (said,) = found
        assert best is not None and said == best[0]
        assert_same(found[said], best[1])
    elif best is not None and own in lost:
        assert lost[best[0]] > lost[own] / 2


def assert_same(found: Plan, expected: Plan) -> None:
    assert found.need_bytes == expected.need_bytes
    assert found.speed == expected.speed


def test_kimi_on_two_sockets_is_told_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kimi-k2", "--machine", TWO_SOCKETS, "--json"]) == 4
    made = json.loads(capsys.readouterr().out)
    (lever,) = made["levers"]
    assert lever["options"] == "--experts int4-row-had"
    assert (
        main(["plan", "kimi-k2", *lever["options"].split(), "--machine", TWO_SOCKETS, "--json"])
        == 0
    )
    same = json.loads(capsys.readouterr().out)
    assert same["need_bytes"] == lever["need_bytes"]
    assert same["predicted"]["decode_tok_s"] == lever["decode_tok_s"]
    assert made["advice"][-1].endswith("more memory")


def test_a_fast_plan_says_what_its_speed_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek-v3", "--machine", TWO_SOCKETS]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokens/s is with 4 of 8 experts deferred, which changes answers" in shown
    assert "--experts int4-s8-mixed also fits: 428.0 GiB" in shown
    made = plan("deepseek-v3", TWO_SOCKETS)
    without = plan("deepseek-v3", TWO_SOCKETS, replace(asked("deepseek-v3"), defer=0))
    assert made.device is not None and made.device.undeferred == without.speed.decode
    assert f"({without.rate(without.speed.decode)} with --defer 0)" in made.speed_words


def test_what_is_the_checkpoints_own_is_not_said_to_lose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its experts are in that format, so that no other holds more."""
    assert main(["plan", "gpt-oss-20b", "--machine", TWO_SOCKETS, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["experts"] == "mxfp4"
    assert not any(lever["options"].startswith("--experts") for lever in made["levers"])


@pytest.mark.thorough
def test_wanted_speed_orders_the_levers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "qwen3-30b-a3b", "--experts", "int8", "--machine", "desktop-24gb-gpu"]
    arguments += ["--device", "cpu", "--json"]
    assert main([*arguments, "--want", "1"]) == 0
    slow = json.loads(capsys.readouterr().out)["predicted"]["decode_tok_s"]
    assert main([*arguments, "--want", str(slow * 1.3)]) == 0
    levers = json.loads(capsys.readouterr().out)["levers"]
    assert 1 <= len(levers) <= 3
    assert all(lever["decode_tok_s"] >= slow * 1.3 for lever in levers)
    assert main([*arguments[:-1], "--want", "90000"]) == 0
    assert "no tried configuration reaches 90000 tokens/s here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("qwen3-30b-a3b", "laptop-8gb-gpu", ()),
        ("qwen3-30b-a3b", "workstation-2x4090", ("--gpus", "0")),
        ("kimi-k2", "xeon-2x32-512gb", ()),
        pytest.param("deepseek-v3", "server-8xl20-1tb", (), marks=pytest.mark.thorough),
        pytest.param("gpt-oss-120b", "desktop-24gb-gpu", (), marks=pytest.mark.thorough),
        pytest.param("qwen3-235b-a22b", "workstation-4090-512gb", ("--experts", "int8", "--want", "9"),
                     marks=pytest.mark.thorough),
        ("qwen3-30b-a3b", "desktop-24gb-gpu", ("--device", "cpu", "--experts", "int8", "--want", "30")),
    ],
)  # fmt: skip
def test_every_lever_that_is_applied_gives_what_it_promised(
    name: str, where: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command with its options: memory and speed are those of the lever, to far less than 5 %."""

    def planned(*more: str) -> dict:
        main(["plan", name, "--machine", where, "--json", *words, *more])
        return json.loads(capsys.readouterr().out)

    levers = [each for each in planned()["levers"] if "without" not in each["options"]]
    assert levers
    for lever in levers:
        made = planned(*lever["options"].split())
        assert made["fits"], lever
        assert made["predicted"]["decode_tok_s"] == pytest.approx(lever["decode_tok_s"], rel=1e-9)
        assert made["predicted"]["prefill_tok_s"] == pytest.approx(lever["prefill_tok_s"], rel=1e-9)
        assert (made["need_bytes"], made["context"]) == (lever["need_bytes"], lever["context"])
        assert made.get("device", {}).get("need_bytes", 0) == lever["device_need_bytes"]


def test_more_than_one_change_is_found_where_one_is_not_enough() -> None:
    """A GPU that holds the rest of the model leaves too little memory for the process's other buffers; so does a long
    context beside large experts."""
    request = Request(Recipe.named("bf16"), context=40_960)
    host = machine("laptop-16gb")
    host = replace(host, available_bytes=int(20.2 * 2**30), total_bytes=32 << 30)
    made = place(build(catalog.get("qwen3-30b-a3b").config), host, request)
    assert not made.fits
    lever = made.advice[0]
    assert lever.plan is not None and lever.plan.fits
    assert lever.options.startswith("--experts ")


def test_measured_losses_are_of_formats_and_in_order() -> None:
    for experts in (True, False):
        rows = losses(experts=experts)
        assert [row.nats for row in rows] == sorted(row.nats for row in rows)
        for row in rows:
            recipe = Recipe.named(row.format) if experts else Recipe.named(dense=row.format)
            assert (recipe.experts_name if experts else recipe.dense.name) == row.format
    known = {row.format for row in losses(experts=True)}
    assert set(automatic()) <= known
    assert {row.format for row in losses(experts=False)} <= set(FORMATS)


def test_speeds_that_nobody_measured_look_so() -> None:
    assumed = plan(
        "qwen3-30b-a3b", "desktop-24gb-gpu", replace(asked("qwen3-30b-a3b"), device="cpu")
    )
    assert not assumed.measured and assumed.speed_words.startswith("~")
    rates = replace(assumed.host.rates, measured=True)
    measured = replace(assumed, host=replace(assumed.host, rates=rates))
    assert not measured.speed_words.startswith("~")
