"""`kt placement`: rules that say where parts of a model go, from files of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ktcli import smallfiles
from ktcli.commands.cli.declarations import argument, option, writable
from ktcli.commands.cli.options import CommandFamily
from ktcli.output import out, safe

app = CommandFamily()


@app.command("import")
def import_(
    file: Annotated[
        Path, argument("FILE", "KTransformers' YAML, or llama.cpp's -ot patterns or command lines.")
    ],
    model: Annotated[
        str | None, option("--model MODEL", "Model that the rules are for. Default: any model.")
    ] = None,
    output: Annotated[
        Path | None, option("--output -o FILE", "Write the rules to this file.", callback=writable)
    ] = None,
) -> None:
    """Translate another program's placement into rules, and list what means no place.

    Nothing of the file is executed or imported. The rules go to standard output unless --output names
    a file; kt plan MODEL --placement FILE shows what they do.

    Examples:

      kt placement import DeepSeek-V3-Chat-multi-gpu.yaml --model deepseek-v3 -o rules.toml
      kt placement import llama-server.sh
    """
    from ktcli.assembly.placements import import_placement
    from ktcli.assembly.subject import find_subject
    from ktcli.models import build
    from ktcli.planner.partnames import PartNames
    from ktcli.planner.rules import rules_text

    parts = None
    if model is not None:
        parts = PartNames.of(build(find_subject(model, ask_hub=True, tell=out.note).config))
    found = import_placement(file, parts)
    text = rules_text(found.rules, f"From {file.name[:200]}.")
    for each in found.left:
        out.warn(f"left out: {safe(each)}")
    rules = [
        {"match": rule.match, "place": rule.place.text} for rule in found.rules.each if rule.place
    ]
    if output is not None:
        smallfiles.write_named(output, text)
        text = f"Wrote {len(rules)} rules to {safe(str(output))}"
    out.result({"rules": rules, "left": list(found.left)}, lambda: text.rstrip())
