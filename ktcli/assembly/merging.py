"""Merges an adapter into a model during its conversion: from the checkpoint's numbers, never from packed codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ktcli.adapters.folder import open_adapter, read_settings
from ktcli.adapters.merged import MergedAdapter
from ktcli.assembly.adapters import base_of, located
from ktcli.assembly.listener import Listener
from ktcli.errors import UsageError
from ktcli.models import build
from ktcli.ops.tensors import Tensor
from ktcli.records import dataclass
from ktcli.store import catalog, places
from ktcli.store.entry import Entry
from ktcli.weights.changed import stored_as
from ktcli.weights.conversion import Source
from ktcli.weights.reader import open_checkpoint
from ktcli.weights.recipe import Recipe, format_of
from ktcli.weights.storage import Reader
from ktcli.weights.strips import pieces_of


@dataclass(frozen=True, slots=True)
class MergedBase:
    """A checkpoint and the adapter that is merged into its weights.

    Attributes:
        name: what the merged model is called in the library.
        folder: the adapter's.
    """

    entry: Entry
    name: str
    folder: Path

    def pack_folder(self, recipe: Recipe) -> Path:
        """Returns the path that the conversion of the merged model to a recipe has in the library."""
        return places.pack_path(self.name, recipe.experts_name, recipe.dense.name)

    @contextmanager
    def opened(self, recipe: Recipe) -> Iterator[Source]:
        """Opens a context that gives the source of a conversion: the checkpoint, with the adapter's updates added to
        its weights.

        Raises:
            BadCheckpoint: the checkpoint or the adapter is damaged, or the adapter is of another base.
            UsageError: changed weights would be rounded to the format of the checkpoint again, which loses most of the
                update.
        """
        with closing(open_checkpoint(self.entry.path)) as checkpoint:
            model = build(checkpoint.config)
            with open_adapter(self.folder, model) as adapter:
                change = MergedAdapter(adapter, model.tensors, checkpoint)
                merged = checkpoint.changed(change)
                changed = {update.tensor.name for update in adapter.updates}
                tensors = [each for each in model.tensors if each.name in changed]
                _refuse_rounding(tensors, merged, recipe)
                yield Source(f"{self.entry.path.name} with {self.folder.name}", merged)


def merged_base(entry: Entry, adapter: str, name: str | None, listener: Listener) -> MergedBase:
    """Returns a checkpoint and the adapter that a conversion merges into its weights, with the name of the merged
    model.

    Args:
        adapter: a name in the library, or a folder.
        name: what the merged model is to be called; None: it is named after both.
    Raises:
        NotFound, BadCheckpoint: there is no such adapter, or it is damaged. UsageError: the name is taken or not valid.
    """
    found, folder = located(adapter)
    settings = read_settings(folder)
    base_of(settings, entry.label, listener)  # warns of another name
    stem = found.name if found else folder.name
    if name is None:
        name = f"{entry.library_label.rpartition('/')[2].partition('@')[0]}-{stem}"
    if not places.is_name(name) or catalog.find(name) is not None:
        raise UsageError(
            f"{name[:120]!r} cannot be the name of a merged model",
            hint="give it another with --as NAME, or a folder with --out",
        )
    return MergedBase(entry, name, folder)


def _refuse_rounding(tensors: list[Tensor], checkpoint: Reader, recipe: Recipe) -> None:
    """Refuses to round changed numbers to the format whose codes the checkpoint has: most of a small change would be
    rounded away again."""
    for tensor in tensors:
        fmt = format_of(tensor, recipe)
        for piece in pieces_of(tensor, checkpoint):
            storage = stored_as(checkpoint.find(piece.at(0), piece.shape))
            if fmt is not None and fmt.bits < 16 and storage.lossless == fmt.name:
                raise UsageError(
                    f"{piece.at(0)} is stored as {storage.label} and would be rounded to {fmt.name} again, "
                    "which loses most of a small update",
                    hint="choose a format with more bits, such as --experts int8 or bf16, or merge into the checkpoint "
                    "in bf16",
                )
