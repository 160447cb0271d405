"""An open model: its engine, its text files, and its KV pages on disk, opened and closed together."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ktcli.answers.format import AnswerFormat
from ktcli.assembly.adapted import identity, read_adapter, with_room
from ktcli.assembly.host import is_full_again, leave_gpus
from ktcli.assembly.kvpages import PageWatch, stored_pages, watched_pages
from ktcli.assembly.kvplaces import MooncakePlace, SharedStore
from ktcli.assembly.listener import SILENT, Listener
from ktcli.assembly.load import load
from ktcli.assembly.planner import Planner, planner_of
from ktcli.assembly.ready import Ready, adapted, at_hand
from ktcli.assembly.request import Wanted
from ktcli.dialogue.local import LocalBackend
from ktcli.errors import DeviceError, OutOfDeviceMemory, UsageError
from ktcli.hardware.gpu import AUTO
from ktcli.models import build
from ktcli.planner.plan import Plan
from ktcli.records import dataclass
from ktcli.store import heat
from ktcli.text.model import TextModel, read_text_model
from ktcli.weights.pack import Pack

if TYPE_CHECKING:
    from ktcli.adapters.packed import PackedAdapter


@dataclass(frozen=True, slots=True)
class Opening:
    """The options with which models are opened.

    Attributes:
        quota_bytes: the most bytes of all KV pages on disk; 0: none are kept.
        records_heat: whether the experts that are chosen are counted for the model's heat map.
        allow_special: whether texts of a conversation may give control tokens.
        shared: where several servers share KV pages; None: nowhere.
        watch: is told which pages are in memory and in the library; None: nobody wants to know.
    """

    wanted: Wanted
    quota_bytes: int
    records_heat: bool
    allow_special: bool = False
    listener: Listener = SILENT
    shared: SharedStore | MooncakePlace | None = None
    watch: PageWatch | None = None


class OpenModel:
    """A loaded model, which can be closed.

    Attributes:
        backend: its engine and texts.
        keeps_pages: whether KV pages outlive it.
        place: where it is, for people; empty: here.
    """

    place = ""

    def __init__(self, ready: Ready, backend: LocalBackend, how: Opening) -> None:
        self.ready, self.backend, self._how = ready, backend, how
        self._held = contextlib.ExitStack()
        # Texts of which embeddings are made seldom come again.
        embeds = backend.engine.spec.embeds
        quota_bytes, shared = (0, None) if embeds else (how.quota_bytes, how.shared)
        engine, watch = backend.engine, None if embeds else how.watch
        self._held.enter_context(watched_pages(engine, watch))
        store = self._held.enter_context(
            stored_pages(engine, ready.pack, quota_bytes, how.listener, shared, watch)
        )
        self.keeps_pages = store is not None

    def read_adapter(self, name: str) -> PackedAdapter:
        """Returns a LoRA adapter of the library for this model, packed for its engine; callable from any thread.

        Raises:
            KtError: there is none of this name for the model, or it cannot be used beside it.
        """
        ready = adapted(self.ready, name)
        exact = self._how.wanted.exact
        found = read_adapter(ready, Pack.open(ready.pack), exact=exact, listener=self._how.listener)
        assert found is not None
        return found

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that closing the model frees: those of its weights."""
        return self.backend.engine.weights_bytes

    def forget(self) -> None:
        """Deletes the model's reference to its backend, after `close`, so that the memory is free once there is no
        other reference.
        """
        del self.backend

    def close(self) -> None:
        """Writes the KV pages that are still to be stored, and the heat map of chosen experts if it is recorded; the
        model's memory is free once there is no reference to the backend.
        """
        try:
            self._held.close()
        finally:
            if self._how.records_heat:
                self._record()

    def _record(self) -> None:
        """Adds the experts that were chosen to the model's heat map.

        A GPU that failed cannot be asked any more; then only the failure is reported.
        """
        engine = self.backend.engine
        with contextlib.suppress(DeviceError):
            fresh = heat.Heat.of(engine.chosen(), engine.spec.top_k)
            heat.add(self.ready.pack, fresh, self._how.listener.warn)


def open_model(
    ready: Ready,
    asked: str,
    how: Opening,
    hear: Callable[[TextModel], None] = lambda texts: None,
) -> OpenModel:
    """Returns a converted model, loaded: its engine, text files and KV pages on disk.

    Args:
        asked: the name with which the model can be found again.
        hear: called with the model's text files before its weights are loaded; it may raise.
    Raises:
        KtError: the model's files are damaged, it makes embeddings, or it does not fit; see `load`.
    """
    texts = read_text_model(ready.name, ready.pack, allow_special=how.allow_special)
    require_text(ready.name, embeds=texts.embeds)
    hear(texts)
    return open_read(ready, texts, asked, how)


def require_text(name: str, *, embeds: bool) -> None:
    """Raises an error if a model makes embeddings (`embeds`) instead of generating text.

    Raises:
        UsageError: the model makes embeddings; the message calls it `name`.
    """
    if embeds:
        raise UsageError(
            f"{name} produces embeddings, not text",
            hint=f"kt serve {name} answers /v1/embeddings and /api/embed; kt list shows models to chat with",
        )


def open_read(ready: Ready, texts: TextModel, asked: str, how: Opening) -> OpenModel:
    """Returns a converted model, loaded, whose text files `texts` were read before; warns of text files that are not
    used. Callable from any thread.

    Args:
        asked: the name with which the model can be found again.
    Raises:
        KtError: its files are damaged, or it does not fit; see `load`.
    """
    if unused := AnswerFormat.of(texts).unused:
        how.listener.warn(f"the response_template of {ready.name} is not used: {unused}")
    for unused in texts.unused:
        how.listener.warn(f"{ready.name}: {unused}")
    began = time.perf_counter()
    engine = load(ready, how.wanted, how.listener)
    took = time.perf_counter() - began
    backend = LocalBackend(ready.name, engine, texts, asked, identity(ready), took)
    return OpenModel(ready, backend, how)


def prepared(name: str, how: Opening) -> Ready:
    """Returns the conversion on disk that a model name means, pulled and converted now if need be; raises as
    `prepare`.
    """
    if (ready := at_hand(name)) is not None:
        return ready
    from ktcli.assembly.prepare import prepare  # loading what pulls and converts takes a moment

    return prepare(name, how.wanted, read_text_model, listener=how.listener)


def after_failure(error: DeviceError, how: Opening) -> str:
    """Chooses the device on which a model whose GPU failed runs once it is closed and opened again; returns a phrase
    about it.

    If the GPU's memory was full, for the first time within an hour, that is the same GPU with the memory that is free
    now. Otherwise it is the CPU, from then on also for other models of this process with device "auto".

    Returns:
        "on the CPU" or "with the GPU memory that is free now"; empty: on none, because the GPU was asked for.
    """
    if isinstance(error, OutOfDeviceMemory) and not is_full_again():
        return "with the GPU memory that is free now"
    if how.wanted.where != AUTO:
        return ""
    leave_gpus()
    return "on the CPU"


def planner_for(ready: Ready, how: Opening) -> Planner:
    """Returns the planner of a converted model: the model, this machine and the request as `load` would use them;
    nothing is loaded.

    Raises:
        UsageError, DeviceError: an option does not fit. NotFound, BadCheckpoint: its files or adapter cannot be read.
    """
    pack = Pack.open(ready.pack)
    model = build(pack.config)
    wanted = with_room(ready, how.wanted, model)
    return planner_of(model, pack.recipe, wanted, ready.pack)


def plan_of(ready: Ready, how: Opening) -> Plan:
    """Returns the plan of a converted model (the place of its parts, bytes and predicted speed) as it would be loaded
    now; nothing is loaded. Raises as `planner_for`, and NotEnoughMemory if a GPU that was asked for is too small.
    """
    return planner_for(ready, how).place()


def give_back_memory() -> None:
    """Collects garbage, including reference cycles, which for an engine are gigabytes, and returns torch's cached GPU
    memory to the driver, so that the next plan sees it as free.
    """
    torch = sys.modules.get("torch")  # if a GPU was used, it is there
    if torch is not None and torch.cuda.is_initialized():
        from ktcli.assembly.load_device import release

        release([torch.device("cuda")])
    else:
        gc.collect()
