"""Machines from words: what is meant is there, and what means nothing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktcli.errors import UsageError
from ktcli.hardware import described
from ktcli.hardware.datasheet import GPUS, data_sheet
from ktcli.hardware.described import described as machine_of
from ktcli.hardware.profile import document, from_document, read_machine, shipped
from ktcli.main import main
from ktcli.planner.cost import ROWS


def test_two_sockets_with_a_gpu() -> None:
    made = read_machine(Path("cpu=2x8452Y ram=512G gpu=4090"))
    assert (made.cpu.model, made.cpu.sockets, len(made.cpu.cores)) == ("Xeon Platinum 8452Y", 2, 72)
    assert made.cpu.isa[0] == "amx"
    assert made.memory.total_bytes == 512 << 30
    assert [len(node.cores) for node in made.nodes] == [36, 36]
    (gpu,) = made.gpus
    assert (gpu.name, gpu.vram_bytes, gpu.capability) == ("NVIDIA RTX 4090", 24 << 30, "8.9")
    assert from_document(json.loads(json.dumps(document(made)))) == made


def test_what_no_table_has_is_said_in_numbers() -> None:
    made = machine_of("cpu=1x12:avx2 ram=1T gpu=3x RTX 3090:48G")
    assert made.cpu.isa == ("avx2", "portable") and len(made.cpu.cores) == 12
    assert made.memory.total_bytes == 1 << 40
    assert [(gpu.index, gpu.vram_bytes) for gpu in made.gpus] == [(n, 48 << 30) for n in range(3)]
    assert machine_of("cpu=13900K ram=64G gpu=none").gpus == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpu=foo ram=1G", "cpu=foo is not in kt's table"),
        ("cpu=9950X", "lacks ram="),
        ("ram=64G", "lacks cpu="),
        ("cpu=9950X ram=lots", "ram='lots' is not a size"),
        ("cpu=9950X ram=0G", "ram='0G' is not a size"),
        ("cpu=9950X ram=64G disk=4T", "has 'disk'"),
        ("cpu=9950X ram=64G ram=32G", "gives a key twice"),
        ("cpu=99x9950X ram=64G", "is not a known part of a machine"),
        ("cpu=8:fast ram=64G", "is not a number of cores with a kernel row"),
        ("cpu=9950X ram=64G gpu=90", "gpu=90 could be"),
        ("cpu=9950X ram=64G gpu=4090:big", "gpu='big' is not a size"),
        ("cpu=" + "9" * 10_000 + " ram=64G", "is not in kt's table"),
    ],
)
def test_words_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        machine_of(text)
    assert said in str(caught.value)
    assert "cpu=2x8452Y" in caught.value.hint


def test_every_row_of_the_tables_makes_a_machine() -> None:
    for name in described._CPUS:
        for gpu in (name for name, row in GPUS.items() if row.memory_gb):
            made = machine_of(f"cpu={name} ram=64G gpu={gpu}")
            assert made.cpu.model == name
            assert ROWS[made.cpu.isa[0]].flags <= set(made.cpu.flags)
            assert data_sheet(made.gpus[0]).name == gpu


def test_a_plan_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "qwen3-30b-a3b", "--machine", "cpu=9950X ram=96G", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] and made["machine"]["isa"] == "avx512bf16"


@pytest.mark.parametrize("name", ["xeon-2x36-4090-512gb", "xeon-2x36-2x4090-1tb"])
def test_two_sockets_with_gpus_ship(name: str) -> None:
    made = read_machine(shipped()[name])
    assert len(made.nodes) == 2 and made.gpus and len(made.cpu.cores) == 72


def test_the_file_that_the_docs_show_is_a_machine(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/plans.md").read_text(encoding="utf-8")
    shown = text.split("```toml\n")[1].split("```")[0]
    file = tmp_path / "machine.toml"
    for form in (shown, shown.replace("# efficient", "efficient").replace("\n# ", "\n")):
        file.write_text(form.replace("read_bps, bf16_ops, copy_bps    #", "#"))
        made = read_machine(file)
        assert len(made.nodes) == 2 and len(made.gpus) == 1
    assert made.measured is not None and made.cpu.efficient
