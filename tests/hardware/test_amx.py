"""Why tiles are used or not: one row per situation, what is said about each condition."""

from __future__ import annotations

from dataclasses import replace
from errno import EACCES, EINVAL, ENOSPC, ENOSYS, EOPNOTSUPP, EPERM
from pathlib import Path

import pytest

from ktcli import native
from ktcli.hardware.amx import Facts, explain, known_for_tiles
from ktcli.hardware.cpu import read_signature
from ktcli.hardware.probe import amx_facts, probe

# A bare-metal Xeon that uses its tiles, and a CPU that has none.
GOOD = Facts(
    tile=True,
    int8=True,
    bf16=True,
    shape=True,
    os_state=True,
    permission=0,
    used_row="amx",
    model="Intel(R) Xeon(R) Platinum 8480+",
    signature=(6, 0x8F),
    release="6.8.0-45-generic",
)
NONE = Facts(
    lacking="amx_tile amx_int8 amx_bf16", used_row="avx512", model="AMD EPYC", release="6.8.0"
)
# A hypervisor that hides the tiles of a CPU kt knows.
HIDDEN = replace(NONE, model="Intel Xeon Processor", signature=(6, 0x8F), hypervisor=True)
UNASKED = replace(GOOD, permission=None, used_row="avx512bf16", lacking="os-tiles")
REFUSED = replace(GOOD, permission=EPERM, used_row="avx512bf16", lacking="amx-permission")

# situation → (facts, do the three conditions hold, used, words of the reason, words of the fix)
CASES: dict[str, tuple[Facts, tuple[bool | None, ...], bool, str, str]] = {
    "used": (GOOD, (True, True, True), True, "all three conditions hold", ""),
    "asked for": (replace(GOOD, forced_isa="amx"), (True, True, True), True, "KT_ISA asks for it", ""),
    "emulated": (replace(GOOD, emulated=True), (True, True, True), True, "an emulator", ""),
    "another row forced": (
        replace(GOOD, used_row="avx2", forced_isa="avx2"), (True, True, True), False,
        "KT_ISA asks for avx2", "",
    ),
    "a forced row that is none": (
        replace(GOOD, used_row="", forced_isa="sse"), (True, True, True), False, "KT_ISA asks for sse", "",
    ),
    "no other condition": (
        replace(GOOD, used_row="avx2", lacking="avx512_bf16"), (True, True, True), False,
        "also need avx512_bf16", "",
    ),
    "not built": (replace(GOOD, lacking=None, used_row="avx2"), (True, True, True), False, "this build", ""),
    "no AMX": (NONE, (False, False, None), False, "this CPU has no AMX", ""),
    "hidden": (HIDDEN, (False, False, None), False, "hypervisor hides it: the CPU is known", "QEMU: -cpu host"),
    "hidden, known by name": (
        replace(HIDDEN, signature=(6, 6), model="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"),
        (False, False, None), False, "AMX (Xeon(R) Platinum 8481)", "pass AMX through",
    ),
    "perhaps hidden": (
        replace(HIDDEN, signature=(6, 106)), (False, False, None), False, "or the hypervisor hides it", "",
    ),
    "switched off": (
        replace(HIDDEN, hypervisor=False), (False, False, None), False, "switched off", "firmware",
    ),
    "no INT8": (
        replace(GOOD, int8=False, permission=None, used_row="avx2"), (False, True, None), False,
        "lacks features that the kernels use", "",
    ),
    "small tiles": (
        replace(GOOD, shape=False, permission=None, used_row="avx2"), (False, True, None), False,
        "lacks features that the kernels use", "",
    ),
    "old kernel": (
        replace(UNASKED, os_state=False, release="5.15.0-100-generic"), (True, False, None), False,
        "too old: Linux 5.15.0-100-generic does not save", "5.16",
    ),
    "unknown kernel": (
        replace(UNASKED, os_state=False, release=""), (True, False, None), False, "too old", "5.16",
    ),
    "state switched off": (
        replace(UNASKED, os_state=False), (True, False, None), False, "although it could", "clearcpuid",
    ),
    "old kernel asked": (
        replace(REFUSED, permission=EINVAL, release="5.10.0"), (True, True, False), False,
        "too old: Linux 5.10.0 does not support tile permissions", "5.16",
    ),
    "not offered": (
        replace(REFUSED, permission=EOPNOTSUPP, release="5.14"), (True, True, False), False, "too old", "5.16",
    ),
    "not offered by a new one": (
        replace(REFUSED, permission=EINVAL), (True, True, False), False, "denied: Invalid argument", "kernel",
    ),
    "filter": (REFUSED, (True, True, False), False, "system call filter", "seccomp"),
    "other filter": (
        replace(REFUSED, permission=ENOSYS), (True, True, False), False, "system call filter", "seccomp",
    ),
    "signal stack": (
        replace(REFUSED, permission=ENOSPC), (True, True, False), False, "signal stack", "signal stacks",
    ),
    "something else": (
        replace(REFUSED, permission=EACCES), (True, True, False), False, "Permission denied", "kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", CASES)
def test_every_situation_is_explained(situation: str) -> None:
    facts, conditions, used, reason, fix = CASES[situation]
    found = explain(facts)
    assert (found.cpuid.ok, found.os.ok, found.permission.ok) == conditions
    assert found.used is used
    assert reason in found.reason
    assert fix in found.fix and bool(found.fix) is bool(fix)
    assert all(check.detail for check in (found.cpuid, found.os, found.permission))


def test_the_conditions_name_what_was_seen() -> None:
    assert explain(replace(GOOD, bf16=False)).cpuid.detail == "CPUID lacks BF16"
    assert "16 rows of 64 bytes" in explain(replace(GOOD, shape=False)).cpuid.detail
    assert "bits 17 and 18" in explain(GOOD).os.detail
    assert "No space left" in explain(replace(REFUSED, permission=ENOSPC)).permission.detail


@pytest.mark.parametrize(
    ("name", "made_with_tiles"),
    [
        ("Intel(R) Xeon(R) Platinum 8480+", True),
        ("Intel(R) Xeon(R) Platinum 8488C", True),
        ("INTEL(R) XEON(R) PLATINUM 8581C CPU @ 2.10GHz", True),
        ("Intel(R) Xeon(R) Gold 6430", True),
        ("Intel(R) Xeon(R) Silver 4514Y", True),
        ("Intel(R) Xeon(R) Bronze 3408U", True),
        ("Intel(R) Xeon(R) CPU Max 9480", True),
        ("Intel(R) Xeon(R) w9-3495X", True),
        ("Intel(R) Xeon(R) 6980P", True),
        ("Intel Xeon Processor (SapphireRapids)", True),
        ("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", False),
        ("Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", False),
        ("Intel(R) Xeon(R) W-3375 CPU @ 2.50GHz", False),
        ("Intel(R) Xeon(R) 6780E", False),
        ("Intel(R) Xeon(R) E5-2690 v4 @ 2.60GHz", False),
        ("Intel(R) Xeon(R) Processor @ 2.70GHz", False),
        ("13th Gen Intel(R) Core(TM) i9-13900K", False),
        ("AMD EPYC 9654 96-Core Processor", False),
        ("AMD Ryzen Threadripper PRO 7975WX", False),
        (None, False),
    ],
)
def test_cpus_that_are_made_with_tiles_are_known_by_name(
    name: str | None, made_with_tiles: bool
) -> None:
    assert bool(known_for_tiles(name, None)) is made_with_tiles


@pytest.mark.parametrize(
    ("signature", "kind"),
    [
        ((6, 143), "Sapphire Rapids"),
        ((6, 207), "Emerald Rapids"),
        ((6, 173), "Granite Rapids"),
        ((6, 174), "Granite Rapids"),
        ((6, 106), ""),
        ((25, 143), ""),
        (None, ""),
    ],
)
def test_and_by_number(signature: tuple[int, int] | None, kind: str) -> None:
    assert known_for_tiles("Intel Xeon Processor", signature) == kind


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        ("cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Xeon\n", (6, 143)),
        ("model name\t: Xeon\n", None),
        ("cpu family\t: six\nmodel\t\t: 143\n", None),
        ("", None),
    ],
)
def test_the_signature_is_read(text: str, signature: object, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert read_signature(tmp_path) == signature


def test_this_machine() -> None:
    machine, rows = probe(), {row.name: row for row in native.isa_rows()}
    facts = amx_facts(machine, machine.cpu.isa[0])
    found = explain(facts)
    if "amx" in rows:
        # The row runs where all three hold; it is the best there is.
        assert rows["amx"].usable is found.used
        assert rows["amx"].usable <= (found.permission.ok is True)
    assert (facts.permission is None) is not (facts.in_cpu and facts.os_state)
    assert found.used or not (facts.permission == 0 and facts.lacking == "")
