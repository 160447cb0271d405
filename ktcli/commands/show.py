"""`kt show`: show what one model is, what it needs, and where its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ktcli.assembly.convert import conversions_outside
from ktcli.commands.cli.declarations import option
from ktcli.commands.cli.options import ModelArg
from ktcli.commands.library.alias import called
from ktcli.errors import KtError, gib
from ktcli.models import build
from ktcli.ops.tensors import Role
from ktcli.output import out, safe
from ktcli.store import adapters, aliases, catalog, library
from ktcli.store.entry import Entry
from ktcli.store.places import EntryKind
from ktcli.store.preset import Preset
from ktcli.store.reference import parse, split_adapter
from ktcli.weights.recipe import Recipe, stored_bytes

if TYPE_CHECKING:
    from ktcli.models.model import Model
    from ktcli.models.pooling import TextPooling

ExpertsOpt = Annotated[
    bool, option("--experts", "Show a chart of how often each expert was chosen in chats.")
]


def show(
    model: ModelArg,
    experts: ExpertsOpt = False,
    program: Annotated[
        bool, option("--program", "Show the operations of a step, one line each.")
    ] = False,
) -> None:
    """Show what a model is and what it needs.

    Works for every name that kt list --all shows, pulled or not, and for local folders; of
    MODEL+ADAPTER it shows what kt adapter show does, too. Chats
    record which experts they use, so that the busiest can be placed where they run fastest. For
    each conversion it shows how much its number formats lose, layer by layer for a conversion
    given by name and with --json.

    Examples:

      kt show qwen3-30b-a3b
      kt show qwen3-30b-a3b --experts
      kt show deepseek-v3 --program           what a step computes
      kt show qwen3-30b-a3b@int4-int8         errors of each layer
      kt show qwen3-30b-a3b+poet              with what an adapter changes
      kt show ./my-model --json
    """
    named, (model, adapter) = model, split_adapter(model)
    entries = library.matching(model)
    if parse(model).folder is not None:  # and what was made of it as it is now
        entries = (entries[0], *conversions_outside(entries[0]))
    profile = catalog.find(entries[0].name if entries else parse(model).name)
    if profile is None and not entries:
        library.resolve(model)
    config = profile.config if profile is not None else _config(entries[0])
    if experts:
        from ktcli.commands.view.experts import show_experts

        return show_experts(model, config)
    if program:
        from ktcli.commands.view.program import show_program

        return show_program(*_formats(entries, profile), config)
    document: dict[str, Any] = {
        "name": profile.name if profile else entries[0].name,
        "title": profile.title if profile else entries[0].name,
        "license": profile.license if profile else None,
        "repositories": dict(profile.repositories) if profile else {},
        "download_bytes": profile.download_bytes if profile else None,
        "formats": {"experts": profile.experts, "dense": profile.dense} if profile else None,
        "architecture": _architecture(config, profile),
        "on_disk": [_place(entry) for entry in entries],
        "aliases": sorted({name for of_one in called(entries).values() for name in of_one}),
        "preset": aliases.preset_of(named).document(),
    }
    if adapter:
        return _show_with(document, adapter, model)
    out.result(document, lambda: _render(document))


def _show_with(document: dict[str, Any], adapter: str, model: str) -> None:
    """Shows a model that has an adapter."""
    from ktcli.assembly.adapters import described
    from ktcli.commands import adapter as of_adapters

    adapters.resolve(adapter)  # of the library, not a folder
    found = described(adapter, model, out)
    whole = {**document, "adapter": of_adapters.document(found)}
    out.result(whole, lambda: f"{_render(document)}\n\n{of_adapters.render(found)}")


def _config(entry: Entry) -> Mapping[str, Any]:
    from ktcli.weights.reader import config_of

    if not entry.complete:
        raise library.incomplete(entry)
    return config_of(entry.path)


def _formats(entries: Sequence[Entry], profile: catalog.ModelProfile | None) -> tuple[str, Recipe]:
    """The name and number formats of the conversion that is there, or of the one that would be made."""
    from ktcli.weights.pack import Pack

    for entry in entries:
        if entry.kind is EntryKind.PACK and entry.complete:
            return entry.label, Pack.open(entry.path).recipe
    if profile is None:
        return entries[0].name, Recipe()
    return profile.name, Recipe.named(profile.experts, profile.dense)


def _architecture(
    config: Mapping[str, Any], profile: catalog.ModelProfile | None
) -> dict[str, Any]:
    """The model's shape and its size in number formats, led by those it is converted to by default; the error, if
    kt cannot build it.

    Args:
        profile: has the parameters as the makers count them; None: those that kt stores are counted, which holds
            MLA's kv_b twice.
    """
    from ktcli.planner.spec import kv_bytes_per_token

    try:
        built = build(config)
    except KtError as error:
        return {"model_type": str(config.get("model_type")), "problem": str(error)}
    spec = built.spec
    experts = [tensor for tensor in built.tensors if tensor.role is Role.EXPERTS]
    active = sum(t.elements * spec.top_k // max(1, spec.experts) for t in experts)
    total = (profile and profile.parameters) or sum(tensor.elements for tensor in built.tensors)
    return {
        "model_type": str(config.get("model_type")),
        "family": spec.family,
        "layers": spec.layers,
        "moe_layers": spec.moe_layers,
        "hidden": spec.hidden,
        "experts": spec.experts,
        "experts_per_token": spec.top_k,
        "expert_width": spec.expert_width,
        "vocab": spec.vocab,
        "context": spec.context,
        "parameters": total,
        "active_parameters": total - sum(t.elements for t in experts) + active,
        "kv_bytes_per_token": kv_bytes_per_token(spec),
        "pack_bytes": _pack_bytes(built, profile, has_experts=bool(experts)),
        **({} if built.pooling is None else {"embedding": _embedding(built.pooling, spec.hidden)}),
    }


def _pack_bytes(
    built: Model, profile: catalog.ModelProfile | None, *, has_experts: bool
) -> dict[str, int]:
    """The size of a model's conversions by their number formats, led by those it is converted to by default."""
    usual = Recipe.named(profile.experts, profile.dense) if profile else Recipe()
    others = (Recipe.named(*each) for each in (("int8", "int8"), ("bf16", "bf16")))
    return {
        f"{each.experts_name}-{each.dense.name}": sum(stored_bytes(t, each) for t in built.tensors)
        for each in (usual, *others)
        if has_experts or each is usual or each.dense != usual.dense
    }


def _embedding(pooling: TextPooling, hidden: int) -> dict[str, Any]:
    """How an embedding model makes a vector of a text."""
    return {
        "dimensions": hidden,
        "shorter": "any" if pooling.any_length else list(pooling.lengths),
        "pooling": pooling.mode.value,
        "normalized": pooling.normalize,
        "prompts": sorted(pooling.prompts),
        "words": pooling.words,
    }


def _place(entry: Entry) -> dict[str, Any]:
    from ktcli.commands.view.fidelity import error_report

    return {
        "name": entry.label,
        "kind": entry.kind.value,
        "size_bytes": entry.size_bytes,
        "path": str(entry.path),
        "source": entry.source,
        "problem": entry.problem,
        "fidelity": error_report(entry.path) if entry.kind is EntryKind.PACK else None,
    }


def _render(document: dict[str, Any]) -> str:
    from ktcli.commands.view.fidelity import render_report

    rows = [("Model", document["title"])]
    if document["aliases"]:
        rows.append(("Alias", ", ".join(document["aliases"])))
    if preset := Preset.of(document["preset"]):
        rows.append(("Preset", preset.words()))
    for hub, repository in document["repositories"].items():
        rows.append(("From", f"{hub}:{repository}"))
    if document["license"]:
        rows.append(("Licence", document["license"]))
    if document["download_bytes"]:
        rows.append(("Download", gib(document["download_bytes"])))
    rows += _shape(document["architecture"])
    for place in document["on_disk"]:
        state = f" ({place['problem']})" if place["problem"] else ""
        rows.append(
            (place["kind"].capitalize(), f"{gib(place['size_bytes'])} in {place['path']}{state}")
        )
    if not document["on_disk"]:
        rows.append(("On disk", f"not on disk; get it with: kt pull {document['name']}"))
    text = out.table([(f"{key}:", safe(value)) for key, value in rows])
    found = [place for place in document["on_disk"] if place["fidelity"]]
    named = len(document["on_disk"]) == 1
    again = any(place["kind"] == EntryKind.CHECKPOINT.value for place in document["on_disk"])
    reports = [
        render_report(safe(place["name"]), place["fidelity"], layers=named, again=again)
        for place in found
    ]
    return "\n\n".join([text, *reports])


def _shape(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if "problem" in facts:
        return [("Architecture", f"{facts['model_type']}; {facts['problem']}")]
    experts = "none: a dense model"
    if facts["experts"]:
        where = f"per layer in {facts['moe_layers']} layers"
        experts = f"{facts['experts']} {where}, {facts['experts_per_token']} per token"
    packs = ", ".join(f"{gib(size)} as {name}" for name, size in facts["pack_bytes"].items())
    layers = f"{facts['model_type']}, {facts['layers']} layers, hidden {facts['hidden']}"
    active = _count(facts["active_parameters"])
    context = f"{facts['context']:,} positions, {gib(facts['kv_bytes_per_token'])} of cache each"
    return [
        ("Architecture", layers),
        ("Parameters", f"{_count(facts['parameters'])}, {active} active per token"),
        ("Experts", experts),
        ("Context", context),
        *_of_embeddings(facts.get("embedding")),
        ("Converted", packs),
    ]


def _of_embeddings(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The row of an embedding model; none of one that generates text."""
    if facts is None:
        return []
    lengths = facts["shorter"]
    also = f", or {', '.join(map(str, lengths))}" if lengths else ""
    if lengths == "any":
        also = ", or fewer"
    return [("Embeddings", f"{facts['dimensions']:,} dimensions{also}; pools {facts['words']}")]


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f} billion"
    return f"{parameters / 1e6:.1f} million"
