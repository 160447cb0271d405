"""The pure parts of the benchmark against other engines: ratios, rows, tensor lists, the table."""

import pytest

from benchmarks.peers import report
from benchmarks.peers.arithmetic import Series, layer_ms, layer_ratios
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.install import versions
from benchmarks.peers.rows import DECODE, PAIRINGS, STREAMS, Pairing, Work, chosen
from benchmarks.peers.shapes import MIXES, Mix, Part, expert_bits, metadata, size_bytes, tensors
from ktcli.models import build, cut
from ktcli.ops.tensors import Role
from ktcli.store import catalog
from ktcli.weights.formats import FORMATS

PREFILL = Work("prefill", 512)


def config(model: str, layers: int) -> dict:
    profile = catalog.find(model)
    assert profile is not None
    return cut(profile.config, layers)


def test_a_run_of_kt_is_compared_with_the_runs_around_it():
    series = Series(peer_s=(2.0, 4.0, 6.0), kt_s=(1.0, 5.0))
    assert series.ratios == (3.0, 1.0)
    assert series.ratio == 2.0


def test_a_drift_of_the_machine_leaves_the_ratio_alone():
    drift = [1.0 + 0.1 * i for i in range(9)]
    series = Series(tuple(3.0 * d for d in drift[::2]), tuple(drift[1::2]))
    assert series.ratios == pytest.approx([3.0] * 4)


def test_runs_that_do_not_alternate_are_refused():
    with pytest.raises(ValueError, match="2 runs of the peer around 2 of kt"):
        Series((1.0, 1.0), (1.0, 1.0))


def test_layers_are_compared_by_the_difference_of_two_cuts():
    # Per layer 2 s against 0.5 s, and 1 s against 3 s for the rest of the model.
    large = Series((17.0, 17.0, 17.0), (7.0, 7.0))
    small = Series((5.0, 5.0, 5.0), (4.0, 4.0))
    assert layer_ratios(large, small) == (4.0, 4.0)
    assert layer_ms(large.peer_s, small.peer_s, 6) == pytest.approx(2000.0)


def test_a_difference_below_zero_says_nothing():
    large, small = Series((2.0, 2.0, 2.0), (1.0, 1.0)), Series((1.0, 1.0, 1.0), (0.5, 1.5))
    assert layer_ratios(large, small) == (2.0,)


@pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda p: f"{p.model}-{p.kt.name}-{p.engine}")
def test_a_row_names_what_exists(pairing: Pairing):
    assert pairing.engine in ENGINES
    assert pairing.mix in MIXES
    assert {pairing.kt.experts, pairing.kt.dense} <= set(FORMATS)
    assert catalog.find(pairing.model) is not None
    assert pairing.layers[0] > pairing.layers[1]


def test_every_package_has_one_version():
    assert {engine.package for engine in ENGINES.values()} <= set(versions())


def test_rows_are_chosen_by_words_and_engines():
    assert chosen((), ()) == list(PAIRINGS)
    assert {work for p in chosen((), (), ("prefill",)) for work in p.goals} == {DECODE, STREAMS}
    found = chosen(("decode", "int8"), ("llama.cpp",))
    assert found
    assert all(p.engine == "llama.cpp" and set(p.goals) <= {DECODE, STREAMS} for p in found)
    assert all("int8" in p.name(DECODE) for p in found)


def test_streams_count_all_their_tokens():
    pairing = Pairing("m", (8, 2), PAIRINGS[0].kt, "llama.cpp", "Q4_0", {STREAMS: 1.3})
    row = report.row(pairing, STREAMS, [Series((4.0, 4.0), (2.0,))])
    assert (row["streams"], row["tok_s"], row["peer_tok_s"]) == (8, 8 * 32 / 2, 8 * 32 / 4)
    assert pairing.streams == 8
    assert pairing.name(STREAMS).startswith("decode 32 x 8 m")


@pytest.mark.parametrize(
    ("model", "layers"), [("qwen3-30b-a3b", 8), ("qwen3-30b-a3b", 2), ("deepseek-v2-lite", 2)]
)
def test_a_file_holds_the_weights_that_kt_holds(model: str, layers: int):
    cut_config = config(model, layers)
    ours = build(cut_config)
    theirs = tensors(cut_config)
    experts = sum(t.elements for t in ours.tensors if t.role is Role.EXPERTS)
    assert sum(t.elements for t in theirs if t.part in (Part.EXPERTS, Part.DOWN)) == experts
    dense = sum(t.elements for t in ours.tensors if t.role is Role.DENSE)
    parts = (Part.DENSE, Part.VALUE, Part.HEAD)
    assert sum(t.elements for t in theirs if t.part in parts) == dense
    assert metadata(cut_config)["block_count"] == layers
    assert len({t.name for t in theirs}) == len(theirs)


def test_bits_of_the_experts():
    cut_config = config("qwen3-30b-a3b", 8)
    assert expert_bits(cut_config, MIXES["Q4_0"]) == 4.5
    assert expert_bits(cut_config, MIXES["BF16"]) == 16
    # Every second layer has its down projection, a third of the experts, in 6.5625 bits.
    assert expert_bits(cut_config, MIXES["Q4_K_M"]) == pytest.approx(4.5 + 2.0625 / 6)


def test_a_row_that_no_block_divides_is_refused():
    found = next(t for t in tensors(config("deepseek-v2-lite", 2)) if t.part is Part.DOWN)
    with pytest.raises(ValueError, match="1408 are no multiple of 256"):
        size_bytes(found, Mix("Q4_K", "Q4_K", "Q6_K"))


def test_the_table_says_what_was_reached():
    pairing = Pairing("m", (8, 2), PAIRINGS[0].kt, "llama.cpp", "Q4_0", {PREFILL: 5.0})
    series = [Series((6.0, 6.0), (1.0,)), Series((2.0, 2.0), (0.5,))]
    row = report.row(pairing, PREFILL, series)
    row |= report.noise(0.2, 0.0) | {"bits": 4.25, "peer_bits": 4.5}
    assert (row["ratio"], row["layer_ratio"], row["reached"]) == (6.0, 8.0, True)
    assert row["layer_ms"] == pytest.approx(1e3 * 0.5 / 6)
    line = report.text([row]).splitlines()[-1]
    assert line.endswith("6.00       8.00  5.00 reached, noisy")
