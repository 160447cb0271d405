"""`kt adapter`: import, list, show, export, verify and remove LoRA adapters in the library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktcli.commands.cli.declarations import argument, option, require_yes
from ktcli.commands.cli.options import CommandFamily, YesOpt
from ktcli.errors import ExitCode, UsageError, counted, gib
from ktcli.output import out, safe
from ktcli.store import adapters, integrity
from ktcli.store.adapters import AdapterEntry

if TYPE_CHECKING:
    from ktcli.adapters.measure import PartSummary
    from ktcli.assembly.adapters import Described

app = CommandFamily()

BaseOpt = Annotated[
    str | None,
    option(
        "--base MODEL",
        "Model that the adapter changes. Default: the one that adapter_config.json names.",
    ),
]
AdapterArg = Annotated[
    str, argument("ADAPTER", "Name, as kt adapter list shows it, or a folder: ./DIR.")
]
_LAYOUTS = ("peft", "per-expert", "kt-kernel")


@app.command("import")
def import_(
    folder: Annotated[Path, argument("DIR", "Folder that peft or LLaMA-Factory saved.")],
    name: Annotated[
        str | None, option("--as NAME", "Name in the library. Default: the folder's.")
    ] = None,
    base: BaseOpt = None,
) -> None:
    """Copy an adapter into the library.

    Reads LoRA as peft saves it (adapter_config.json and adapter_model.safetensors), with experts in
    one parameter or as modules of their own, and kt-kernel's fused_expert_lora.safetensors beside it.
    Every shape is compared with the base model's config, and every number is read; the base model's
    weights are not needed. The adapter is imported completely or not at all.

    Examples:

      kt adapter import ./saves/qwen3-30b-a3b/lora/sft --as poet
      kt adapter import ./out --base qwen3-30b-a3b
    """
    from ktcli.assembly.adapters import import_adapter

    found = import_adapter(folder, name, base, out)
    words = document(found)
    said = f"Imported {safe(found.name)} for {safe(found.base.name)}, {gib(found.size_bytes)}."
    out.result(words, lambda: f"{said}\n\n{render(found)}")


@app.command("list")
def list_() -> None:
    """List the adapters in the library.

    Examples:

      kt adapter list
      kt adapter list --json
    """
    found = adapters.every()
    rows = [
        {
            "name": each.name,
            "base": each.base,
            "size_bytes": each.size_bytes,
            "problem": each.problem or None,
        }
        for each in found
    ]
    shown = [
        (each.name, safe(each.problem) if each.problem else safe(each.base), gib(each.size_bytes))
        for each in found
    ]
    head = ("ADAPTER", "BASE", "SIZE")
    out.result({"adapters": rows}, lambda: out.table(shown, head) if shown else "")
    if not found:
        out.note("There are no adapters yet. Import one with: kt adapter import DIR")


@app.command()
def show(adapter: AdapterArg, base: BaseOpt = None) -> None:
    """Show what an adapter changes, and by how much.

    Lists, for each part of the base model, the modules that were trained, their ranks and scales,
    and the Frobenius norm of the whole update, scale x B x A. An adapter whose norms are 0 was not
    trained.

    Examples:

      kt adapter show poet
      kt adapter show ./out --base qwen3-30b-a3b --json
    """
    from ktcli.assembly.adapters import described

    found = described(adapter, base, out)
    out.result(document(found), lambda: render(found))


@app.command()
def export(
    adapter: AdapterArg,
    target: Annotated[Path, argument("DIR", "New folder for the files.")],
    layout: Annotated[str, option("--layout LAYOUT", f"One of {', '.join(_LAYOUTS)}.")] = "peft",
    base: BaseOpt = None,
) -> None:
    """Write an adapter in the layout that another program reads.

    peft: as peft 0.21 with transformers 5 saves it. per-expert: modules for each expert, as SGLang
    and vLLM take them. kt-kernel: with fused_expert_lora.safetensors, whose numbers are bf16. The
    first two hold the same numbers; where one A becomes two, or two become one of twice the rank,
    the update stays the same.

    Examples:

      kt adapter export poet ./poet-for-vllm --layout per-expert
      kt adapter export poet ./poet
    """
    from ktcli.adapters.export import AdapterLayout
    from ktcli.assembly.adapters import write_adapter

    if layout not in _LAYOUTS:
        raise UsageError(
            f"--layout: unknown layout {layout[:60]!r}", hint=f"use one of {', '.join(_LAYOUTS)}"
        )
    names = write_adapter(adapter, target, AdapterLayout(layout), base, out)
    words = {"adapter": adapter, "path": str(target), "layout": layout, "files": list(names)}
    said = f"Wrote {safe(adapter)} to {safe(target)} in the {layout} layout: {', '.join(names)}"
    out.result(words, said)


@app.command()
def verify(
    names: Annotated[
        list[str] | None,
        argument("ADAPTER...", "Names, as kt adapter list shows them. Default: all."),
    ] = None,
) -> None:
    """Check the files of adapters against their hashes.

    Reads every byte, and compares sizes and SHA-256 with those recorded at the import. Exit code 5:
    something differs.

    Examples:

      kt adapter verify
      kt adapter verify poet --json
    """
    found = [adapters.resolve(name) for name in names] if names else list(adapters.every())
    reports = [_checked(entry) for entry in found]
    ok = not any(report["bad"] for report in reports)
    words = "" if reports else "There are no adapters to check."
    out.result({"ok": ok, "adapters": reports}, lambda: words + "\n".join(map(_verdict, reports)))
    if not ok:
        raise typer.Exit(ExitCode.DAMAGED)


def _checked(entry: AdapterEntry) -> dict[str, Any]:
    bad = {adapters.MANIFEST: entry.problem} if entry.problem else {}
    with out.progress(f"Checking {entry.name}", entry.size_bytes) as bar:
        checked = integrity.check(entry.path, entry.records, bar.advance)
        bad |= {file.name: problem for file, problem in checked if problem}
    return {
        "name": entry.name,
        "files": len(entry.records),
        "size_bytes": entry.size_bytes,
        "bad": bad,
    }


def _verdict(report: dict[str, Any]) -> str:
    name = safe(report["name"])
    if not report["bad"]:
        return f"{name}: all {report['files']} files are intact, {gib(report['size_bytes'])}"
    lines = [f"{name}: {len(report['bad'])} of {report['files']} files are damaged"]
    lines += [f"  {safe(file)} {safe(problem)}" for file, problem in report["bad"].items()]
    return "\n".join(
        [*lines, f"  import it again: kt adapter rm {name}, then kt adapter import DIR"]
    )


@app.command()
def rm(
    names: Annotated[list[str], argument("ADAPTER...", "Names, as kt adapter list shows them.")],
    yes: YesOpt = False,
) -> None:
    """Remove adapters from the library.

    Examples:

      kt adapter rm poet
      kt adapter rm poet painter --yes
    """
    found = {entry.name: entry for entry in map(_removable, names)}
    size = sum(entry.size_bytes for entry in found.values())
    require_yes(f"Remove {', '.join(found)} and free {gib(size)}?")
    freed = sum(adapters.remove(entry) for entry in found.values())
    words = {"removed": list(found), "freed_bytes": freed}
    out.result(words, f"Removed {', '.join(found)}, freed {gib(freed)}.")


def _removable(name: str) -> AdapterEntry:
    """The adapter of a name, a damaged one too."""
    return adapters.find(name) or adapters.resolve(name)


# --- what is shown ----------------------------------------------------------------------------------


def document(found: Described) -> dict[str, Any]:
    """Returns the description of an adapter as the document for --json: its path, base model and size in bytes, and
    under "parts" for each trained part of the model the modules with their ranks, scales and the norm of the update.
    """
    return {
        "adapter": found.name or None,
        "path": str(found.folder),
        "base": found.base.said,
        "named_base": found.settings.base or None,
        "size_bytes": found.size_bytes,
        "numbers": list(found.dtypes),
        "norms_replaced": found.gains,
        "dropout": found.settings.dropout,
        "rslora": found.settings.rslora,
        "trained_on": list(found.trained_on),
        "parts": [
            {
                "part": each.part.value,
                "targets": list(each.names),
                "modules": each.modules,
                "ranks": list(each.ranks),
                "scales": list(each.scales),
                "size_bytes": each.size_bytes,
                "norm": each.norm,
            }
            for each in found.parts
        ],
    }


def render(found: Described) -> str:
    """Returns the description of an adapter as text for the terminal: lines with its name, base model, kind and size,
    and a table with a row for each part of the model that was trained.
    """
    kind = "rsLoRA" if found.settings.rslora else "LoRA"
    numbers = ", ".join(each.lower() for each in found.dtypes)
    lines = [
        ("adapter", safe(found.name or found.folder)),
        ("base", safe(found.base.name)),
        ("named base", safe(found.settings.base or "none")),
        ("kind", f"{kind}, {numbers}" if numbers else kind),
        ("size", gib(found.size_bytes)),
    ]
    if found.trained_on:
        lines.append(("trained on", safe(", ".join(found.trained_on))))
    if found.gains:
        lines.append(("norms", f"{counted(found.gains, 'norm')} replaced"))
    above = "\n".join(f"{name:<11} {text}" for name, text in lines)
    head = ("PART", "TARGETS", "MODULES", "RANK", "SCALE", "SIZE", "NORM")
    return f"{above}\n\n{out.table([_row(each) for each in found.parts], head)}"


def _row(each: PartSummary) -> tuple[str, ...]:
    return (
        each.part.value,
        ", ".join(each.names),
        str(each.modules),
        ", ".join(map(str, each.ranks)),
        ", ".join(f"{scale:g}" for scale in each.scales),
        gib(each.size_bytes),
        f"{each.norm:.3g}",
    )
