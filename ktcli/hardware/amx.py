"""Tells whether AMX tiles are used, or why not: a pure function of facts.

Tiles need three things, in this order: a CPU that has them (CPUID), an operating system that saves their
registers (XCR0), and its permission for this process (ARCH_REQ_XCOMP_PERM). CPU and system may also be
fine and the row still not be used, because KT_ISA asks for another.
"""

from __future__ import annotations

import os
import re
from errno import EINVAL, ENOSPC, ENOSYS, EOPNOTSUPP, EPERM

from ktcli.records import dataclass

ROW = "amx"  # the row of kernels with tiles
FIRST_LINUX = (5, 16)  # the first Linux that saves tile registers and gives permissions

# (family, model) of CPUs with AMX, as /proc/cpuinfo shows them.
_MODELS = {
    (6, 0x8F): "Sapphire Rapids",
    (6, 0xCF): "Emerald Rapids",
    (6, 0xAD): "Granite Rapids",
    (6, 0xAE): "Granite Rapids",
}
# The same CPUs by name, for hypervisors that report another model: Xeon Scalable of the generations 4 and
# 5 are numbered x4xx and x5xx; Max, W-2400 to W-3500 and Xeon 6 with P cores have numbers of their own.
_NAMES = (
    r"(?:Sapphire|Emerald|Granite) ?Rapids"
    r"|Xeon.*\b(?:Platinum 8|Gold [56]|Silver 4|Bronze 3)[45]\d\d"
    r"|Xeon.*\bMax 94\d\d"
    r"|Xeon.*\bw[3579]-[23][45]\d\d"
    r"|Xeon.*\b6[3579]\d\dP"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that decide whether AMX tiles are used.

    Attributes:
        tile, int8, bf16: CPUID lists these instructions. shape: tiles of 16 rows of 64 bytes, at least.
        os_state: XCR0 holds bits 17 and 18.
        permission: 0: granted; otherwise the errno of the request; None: not requested.
        emulated: a test's emulator stands in for the CPU.
        lacking: the CPU features that the row misses, as the native library lists them; None: this build has no such
            row.
        used_row: the row in use; empty: none. forced_isa: KT_ISA.
        model: the CPU's marketing name. signature: its family and model number; None: unknown.
        hypervisor: this is a virtual machine.
        release: the release of the Linux kernel, "6.8.0-45-generic"; empty: unknown.
    """

    tile: bool = False
    int8: bool = False
    bf16: bool = False
    shape: bool = False
    os_state: bool = False
    permission: int | None = None
    emulated: bool = False
    lacking: str | None = ""
    used_row: str = ""
    forced_isa: str | None = None
    model: str | None = None
    signature: tuple[int, int] | None = None
    hypervisor: bool = False
    release: str = ""

    @property
    def in_cpu(self) -> bool:
        """Whether CPUID lists all AMX features that kernels with tiles use: tile, INT8, BF16, tiles of full size."""
        return self.tile and self.int8 and self.bf16 and self.shape


@dataclass(frozen=True, slots=True)
class Check:
    """One condition: whether it holds (None: not checked), and what was found."""

    ok: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether tiles are used, and the reason, with the three conditions.

    Attributes:
        fix: the action that makes tiles usable; empty if nothing prevents them, or nothing helps.
        possible: whether this CPU could have them; else they are not worth a word.
    """

    cpuid: Check
    os: Check
    permission: Check
    used: bool
    reason: str
    fix: str = ""
    possible: bool = True


def explain(facts: Facts) -> Verdict:
    """Returns the verdict about AMX: whether the tile kernels are used, why or why not, what would make them usable,
    and the checks of CPUID, operating system and permission.
    """
    reason, fix = _reason(facts)
    return Verdict(
        cpuid=_cpuid(facts),
        os=_os(facts),
        permission=_permission(facts),
        used=facts.used_row == ROW,
        reason=reason,
        fix=fix,
        possible=_possible(facts),
    )


def _possible(facts: Facts) -> bool:
    """Returns whether the CPU has any of it, is known to, or may have it behind a hypervisor; or somebody asks for
    it.
    """
    seen = facts.tile or facts.int8 or facts.bf16 or facts.forced_isa == ROW
    hidden = facts.hypervisor and "intel" in (facts.model or "").lower()
    return seen or hidden or bool(known_for_tiles(facts.model, facts.signature))


def known_for_tiles(model: str | None, signature: tuple[int, int] | None) -> str:
    """Returns what shows that a CPU is of a generation that has AMX: the generation's name ("Sapphire Rapids"), found
    by `signature`, else the matching part of the marketing name; "" if neither shows it.

    Args:
        model: the marketing name of the CPU; None: unknown.
        signature: its family and model number, as in /proc/cpuinfo; None: unknown.
    """
    if signature in _MODELS:
        return _MODELS[signature]
    found = re.search(_NAMES, model or "", re.IGNORECASE)
    return found[0] if found else ""


# --- the three conditions ---------------------------------------------------------------------------


def _cpuid(facts: Facts) -> Check:
    parts = {"tile": facts.tile, "INT8": facts.int8, "BF16": facts.bf16}
    missing = [name for name, there in parts.items() if not there]
    if missing:
        return Check(False, f"CPUID lacks {', '.join(missing)}")
    if not facts.shape:
        return Check(False, "its tiles are smaller than 16 rows of 64 bytes")
    return Check(True, "CPUID lists tile, INT8, BF16")


def _os(facts: Facts) -> Check:
    saves = "saves" if facts.os_state else "does not save"
    return Check(facts.os_state, f"the system {saves} tile registers (XCR0, bits 17 and 18)")


def _permission(facts: Facts) -> Check:
    if facts.permission is None:
        return Check(None, "not requested: a condition above is not met")
    if facts.permission == 0:
        return Check(True, "the kernel allows this process to use tiles")
    said = os.strerror(facts.permission)
    return Check(False, f"the kernel denies ARCH_REQ_XCOMP_PERM: {said}")


# --- why --------------------------------------------------------------------------------------------


def _reason(facts: Facts) -> tuple[str, str]:
    """Why tiles are or are not used, and what to do about it."""
    if facts.lacking is None:
        return "this build has no AMX kernels: its compiler does not support AMX", ""
    if not facts.in_cpu:
        return _no_cpu(facts)
    if not facts.os_state:
        return _no_state(facts)
    if facts.permission != 0:
        return _no_permission(facts)
    if facts.used_row == ROW:
        if facts.emulated:
            return "an emulator stands in for the CPU; it is slow and meant for tests", ""
        return "KT_ISA asks for it" if facts.forced_isa else "all three conditions hold", ""
    if facts.lacking:
        return f"the tile kernels also need {facts.lacking}", ""
    if facts.forced_isa:
        return f"it runs here, but KT_ISA asks for {facts.forced_isa}", ""
    return "it runs here, but another row is used", ""


def _no_cpu(facts: Facts) -> tuple[str, str]:
    kind = known_for_tiles(facts.model, facts.signature)
    if facts.tile:
        return "the CPU has tiles, but lacks features that the kernels use", ""
    if kind and facts.hypervisor:
        return (
            f"the hypervisor hides it: the CPU is known to have AMX ({kind})",
            "let the hypervisor pass AMX through (QEMU: -cpu host), or choose a machine type with AMX",
        )
    if kind:
        return (
            f"it is switched off: the CPU is known to have AMX ({kind})",
            "switch AMX on in the firmware's settings",
        )
    if facts.hypervisor and "intel" in (facts.model or "").lower():
        return "this CPU has no AMX, or the hypervisor hides it", ""
    return "this CPU has no AMX", ""


def _no_state(facts: Facts) -> tuple[str, str]:
    if not _old(facts.release):
        return (
            f"Linux {facts.release} does not save tile registers although it could",
            "remove clearcpuid and noxsave from the kernel's command line, and let the hypervisor"
            " pass AMX through",
        )
    return _too_old(facts, "save tile registers")


def _no_permission(facts: Facts) -> tuple[str, str]:
    code = facts.permission
    if code in (EINVAL, EOPNOTSUPP) and _old(facts.release):
        return _too_old(facts, "support tile permissions")
    if code == ENOSPC:
        return (
            "permission denied: a thread's signal stack is too small for tile registers",
            "start kt by itself, not from a program that sets small signal stacks",
        )
    if code in (EPERM, ENOSYS):
        return (
            "permission denied: a system call filter forbids arch_prctl",
            "allow arch_prctl in the container's seccomp profile",
        )
    words = os.strerror(code) if code else "not requested"
    return f"permission denied: {words}", "use a Linux kernel that permits AMX"


def _too_old(facts: Facts, what: str) -> tuple[str, str]:
    release = f"Linux {facts.release}" if facts.release else "Linux"
    return f"the kernel is too old: {release} does not {what}", "use Linux 5.16 or later"


def _old(release: str) -> bool:
    """Returns whether a release is older than tiles; an unknown one counts as old, as that is the likely cause."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return not found or (int(found[1]), int(found[2])) < FIRST_LINUX
