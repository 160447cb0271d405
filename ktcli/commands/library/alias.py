"""`kt alias`: give models your own names, with presets; list and remove them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from ktcli.commands.chat import options
from ktcli.commands.cli.declarations import argument, option, setting_option
from ktcli.errors import KtError, NotFound, UsageError
from ktcli.output import out, safe
from ktcli.records import dataclass
from ktcli.store import adapters, aliases, library, modelfile, ollama
from ktcli.store.aliases import Alias
from ktcli.store.entry import Entry
from ktcli.store.preset import NOTHING, Preset
from ktcli.store.reference import Reference, split_adapter


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """What is set for a name; the fields are those of a preset."""

    system: options.System = None
    temperature: options.Temperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None
    min_p: options.MinP = None
    repetition_penalty: options.Penalty = None
    seed: options.Seed = None
    stop: options.Stop = None
    max_tokens: options.MaxTokens = None
    think: options.Think = None
    think_budget: options.ThinkBudget = None
    context: Annotated[int | None, setting_option("context", "-c", min=1)] = None

    @property
    def preset(self) -> Preset:
        """The preset of sampling, texts and lengths that the options give. Raises: UsageError: a value is invalid."""
        given = {name.replace("_", "-"): value for name, value in asdict(self).items()}
        try:
            return Preset.of({**given, "stop": self.stop or None})
        except ValueError as error:
            raise UsageError(f"--{error}", hint="kt alias --help shows the options") from None


def alias(
    *,
    name: Annotated[
        str | None, argument("[ALIAS]", "Alias to create. Default: list all aliases.")
    ] = None,
    model: Annotated[
        str | None, argument("[MODEL]", "Model that it stands for, as for kt chat.")
    ] = None,
    file: Annotated[
        Path | None, option("--file -f FILE", "Read model and preset from an Ollama Modelfile.")
    ] = None,
    presets: PresetOptions,
    remove: Annotated[bool, option("--rm", "Remove the alias, not the model.")] = False,
) -> None:
    """Give a model a name of your own, or list these names.

    The name works in every command. It never hides a model: names in the catalogue or the library
    are refused, and if a model later gets the same name, the name means that model.

    Options preset values for the name: kt chat and kt serve use them, and so do requests to a server
    that name it. An option on the command line or a field of a request overrides the preset; the
    preset overrides the settings and the model's own sampling. Without MODEL, options change the
    preset of an alias that exists; with MODEL, the alias is made anew.

    Examples:

      kt alias big qwen3-235b-a22b@int4-int8   then: kt chat big
      kt alias mine ~/models/my-model
      kt alias terse big --system "Answer in one sentence." --temperature 0.2
      kt alias terse --max-tokens 200          change the preset
      kt alias helper -f Modelfile             as written for Ollama
      kt alias                                 what names mean
      kt alias --rm big
    """
    given = presets.preset
    if remove:
        _remove(name, alone=model is None and file is None and not given)
    elif file is not None:
        _from_file(name, model, file, given)
    elif name is not None and model is not None:
        _make(name, model, given)
    elif name is not None and given:
        _tell(aliases.change(name, given))
    else:
        _list(name)


def name_it(name: str, target: str, preset: Preset = NOTHING) -> str:
    """Sets the alias `name` to the model `target`; returns the model that it meant before, empty if it is new, and
    prints that model if it is another.
    """
    before = aliases.save(name, target, preset)
    if before and before != target:
        out.note(f"{name} meant {safe(before)} before.")
    return before


def lasting_target(model: str, reference: Reference) -> str:
    """Returns the model name to store for an alias: one that means the same from every folder. The name of another
    alias is returned unchanged, so that later changes of that one count.
    """
    stem = model.partition("@")[0].lower()
    if any(each.name.lower() == stem and not aliases.is_hidden(each) for each in aliases.every()):
        return model
    return f"{reference.lasting}@{reference.formats}" if reference.formats else reference.lasting


def _remove(name: str | None, *, alone: bool) -> None:
    if name is None or not alone:
        raise UsageError("--rm takes one alias", hint="kt alias --rm NAME")
    gone = aliases.remove(name)
    said = f"{safe(gone.name)} no longer means {safe(gone.target) or 'anything'}."
    out.result({"removed": gone.name, "meant": gone.target}, said)


def _make(name: str, model: str, preset: Preset, unused: Sequence[str] = ()) -> None:
    aliases.require_free(name)
    base, adapter = split_adapter(model)
    target = lasting_target(base, library.require_meaning(base))
    if adapter:
        target = f"{target}+{adapters.resolve(adapter).name}"
    _tell(Alias(name, target, preset), name_it(name, target, preset), unused)


def _from_file(name: str | None, model: str | None, file: Path, given: Preset) -> None:
    if name is None or model is not None:
        raise UsageError(
            "--file takes one alias and no model, which the file names",
            hint=f"kt alias NAME -f {file}",
        )
    aliases.require_free(name)
    found = modelfile.read(file)
    for line in found.unused:
        out.note(f"{file}: {safe(line)}")
    try:
        _make(name, _from(found.model, file), given.over(found.preset), found.unused)
    except (NotFound, UsageError) as error:
        error.hint = f"FROM in {file} names it; {error.hint or 'name a GGUF file there'}"
        raise


def _from(said: str, file: Path) -> str:
    """The text that FROM means: a file or folder beside the Modelfile, a model in Ollama's store, or one of kt's."""
    try:
        beside = file.absolute().parent / Path(said).expanduser()
        if beside.exists():
            return str(beside)
    except (OSError, ValueError, RuntimeError):  # of a name that no file can have
        pass
    with suppress(UsageError, NotFound):
        return ollama.find(f"{ollama.PREFIX}{said}").text
    return said


def _tell(made: Alias, before: str = "", unused: Sequence[str] = ()) -> None:
    document = {"alias": made.name, "model": made.target, "before": before or None}
    sets = f", with {safe(made.preset.words())}" if made.preset else ""
    said = f"{made.name} means {safe(made.target)}{sets}. Talk to it: kt chat {made.name}"
    out.result({**document, "preset": made.preset.document(), "unused": list(unused)}, said)


def called(entries: Sequence[Entry]) -> Mapping[Path, Sequence[str]]:
    """Returns a dict from the paths of library entries to their aliases; if the file of aliases cannot be read, prints
    a warning and returns {}.
    """
    try:
        return library.called(entries)
    except KtError as error:
        out.warn(str(error), hint=error.hint)
        return {}


def _list(name: str | None) -> None:
    known = aliases.every()
    if name is not None:
        found = tuple(each for each in known if each.name.lower() == name.lower())
        if not found:
            raise aliases.absent(name, known, f"kt alias {name[:96]} MODEL")
        known = found
    rows = [_document(each) for each in known]
    shown = [
        (safe(each.name), safe(each.target), row["state"], safe(each.preset.words()))
        for each, row in zip(known, rows, strict=True)
    ]
    columns = 4 if any(each.preset for each in known) else 3
    head = ("ALIAS", "MEANS", "STATE", "PRESET")[:columns]
    table = [row[:columns] for row in shown]
    out.result({"aliases": rows}, lambda: out.table(table, head) if table else "")
    if not rows:
        out.note("There are no aliases yet. Create one with: kt alias NAME MODEL")


def _document(each: Alias) -> dict[str, Any]:
    sets = each.preset.document()
    return {"alias": each.name, "model": each.target, "state": _state(each), "preset": sets}


def _state(each: Alias) -> str:
    """What an alias leads to, in words."""
    if each.fault:
        return f"not usable: {safe(each.fault)}"
    if aliases.is_hidden(each):
        return "ignored: a model has this name"
    try:
        model, adapter = split_adapter(each.name)
        if adapter:
            adapters.resolve(adapter)
        if library.find(model) is not None:
            return "on disk"
        reference = library.require_meaning(model)
    except KtError as error:
        return str(error)
    if reference.repository and not reference.formats:
        return f"kt pull {each.name}"
    return f"kt chat {each.name} converts it"
