"""The application state: what the handlers of all APIs share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet, WeakValueDictionary

from starlette.requests import Request

from ktcli.answers.format import AnswerFormat
from ktcli.assembly.listener import SILENT, Listener
from ktcli.dialogue.answer import AnswerOptions
from ktcli.dialogue.prompts import EncodedPrompt
from ktcli.engine.constraint import Constraint
from ktcli.errors import KtError, UsageError
from ktcli.records import dataclass
from ktcli.server.http.kept import KeptResponses
from ktcli.server.http.keys import ApiKeys
from ktcli.server.http.metrics import Metrics
from ktcli.server.http.refusals import OWN_NAMES, FieldNames, Refusal, about, bad_value
from ktcli.server.http.seal import ThoughtSeal
from ktcli.server.models.catalogue import Catalogue
from ktcli.server.models.constraining import Submitted, submitted
from ktcli.server.models.generation import Generation
from ktcli.server.models.jobs import Jobs
from ktcli.server.models.libraryeditor import LibraryEditor
from ktcli.server.models.model import Lease, ServedModel
from ktcli.server.models.prompts import PromptSource, require_ids
from ktcli.server.models.residency import Residency
from ktcli.server.models.source import ModelFacts, ModelSource, adapter_digest
from ktcli.server.process.drain import Drain
from ktcli.server.process.draintime import DRAIN_S
from ktcli.server.process.requestrecorder import RequestRecorder
from ktcli.server.tracing.spans import Trace
from ktcli.store.preset import NOTHING, Preset
from ktcli.text.infill import Infill
from ktcli.text.settings import Settings

T = TypeVar("T")
KEY_NAME = "kt.key"  # the key of a scope under which the guard puts the name of the API key


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a server.

    Attributes:
        keys: the API keys, one of which clients must send; none: no key is needed.
        hosts: the allowed values of Host beside this machine's own names; empty: any.
        origins: the origins whose pages may ask, beside the server's own.
        root_path: the path below which a proxy publishes the server; empty: none.
        strict_model: whether a request must name the model that is loaded.
        aliases: further names of the model.
        address: where it says that it is, for `kt ps`.
        preset: what the name presets with which the server was started, for requests that name no alias of their own.
        defaults: sampling for all models, below what their names preset.
        drain_s: the seconds that answers may take to finish once the server shuts down.
        decode_tok_s: the planned tokens per second of one answer, for routers; None: the model writes none.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    root_path: str = ""
    strict_model: bool = False
    aliases: tuple[str, ...] = ()
    address: str = ""
    preset: Preset = NOTHING
    defaults: Preset = NOTHING
    drain_s: float = DRAIN_S
    decode_tok_s: float | None = None


class ModelAbilities(NamedTuple):
    """The capabilities of a model, by its text files.

    Attributes:
        template: the source of its chat template.
        capabilities: what it can do, in Ollama's words.
        settings: its own settings of an answer.
    """

    template: str
    capabilities: list[str]
    settings: Settings

    @classmethod
    def of(cls, answers: AnswerFormat) -> ModelAbilities:
        """Returns the chat template, the capabilities and the settings of a model. To be called on the main thread,
        since the template is tried."""
        can = ["completion"]  # of one that generates text
        can += ["tools"] if answers.may_call else []
        can += ["thinking"] if answers.thinks else []
        can += ["insert"] if Infill.of(answers.texts.tokenizer.added) else []
        return cls(answers.texts.template.source, can, answers.texts.settings)


@dataclass(slots=True)
class ServerState:
    """The application state, shared by the handlers of all APIs.

    Attributes:
        editor: pulls and removes models for clients; None: it is not allowed.
        listener: receives warnings.
        log, trace: called after each request, see `Guard`.
        recorder: records requests for replays; None: nobody asked for it.
        begun: whether the server's own model has been loaded once.
        since: when the server began, seconds since 1970.
        abilities: of models, by their keys and identities.
        attached: the answers to attached chats, and requests for embeddings, which are cancelled when the server ends.
        kept: the latest responses.
        seal: seals thoughts that clients keep.
    """

    residency: Residency
    catalogue: Catalogue
    jobs: Jobs
    rules: Rules = field(default_factory=Rules)
    editor: LibraryEditor | None = None
    listener: Listener = SILENT
    log: Callable[[dict[str, Any]], None] = lambda entry: None
    recorder: RequestRecorder | None = None
    trace: Trace | None = None
    begun: bool = False
    abilities: dict[tuple[str, str], ModelAbilities] = field(default_factory=dict)
    since: int = field(default_factory=lambda: int(time.time()))
    drain: Drain = field(init=False)
    metrics: Metrics = field(init=False)
    answering: WeakValueDictionary[str, Generation] = field(default_factory=WeakValueDictionary)
    attached: WeakSet[Submitted] = field(default_factory=WeakSet)
    kept: KeptResponses = field(default_factory=KeptResponses)
    seal: ThoughtSeal = field(default_factory=ThoughtSeal)

    def __post_init__(self) -> None:
        self.drain = Drain(self.rules.drain_s)
        self.metrics = Metrics(self.residency)

    @property
    def status(self) -> str:
        """The health of the server: "draining" while it shuts down, "loading" while its own model is loaded at first or
        after its GPU failed, "failed" where it could not be loaded again, else "ok".
        """
        own = self.catalogue.own
        if self.drain.begun:
            return "draining"
        if not self.begun or self.residency.recovering(own):
            return "loading"
        return "ok" if self.residency.unrecovered(own) is None else "failed"

    async def named(self, name: str) -> ModelSource:
        """Returns the model that a request names: one of the library or, for an unknown name, the server's own.

        Raises:
            Refusal: the name is unknown, and the server is strict or the name could be that of an adapter.
        """
        found = await self.catalogue.find(name)
        if found is None and await self.catalogue.is_unserved(name):
            said = f"{name[:200]!r} is not served: no such model, or no such adapter of it"
            raise Refusal(404, said, "model", "model_not_found")
        if found is None and self.rules.strict_model:
            raise Refusal(
                404,
                f"model not found: {name[:200]!r} (this server serves {self.catalogue.own.name})",
                "model",
                "model_not_found",
            )
        return found or self.catalogue.own

    async def listed(self) -> list[ModelSource]:
        """Returns the models that the server lists: those of the library or, if it is strict, its own with and without
        adapters."""
        found = await self.models()
        own = self.catalogue.own.key
        return [each for each in found if each.key == own] if self.rules.strict_model else found

    async def models(self) -> list[ModelSource]:
        """Returns all models of the library: the server's own first, then those in memory, then the others."""
        found = await self.catalogue.models()
        own = self.catalogue.own.key
        return sorted(found, key=lambda each: (each.key != own, self.residency.find(each) is None))

    async def facts(self, source: ModelSource) -> ModelFacts:
        """Returns the facts of a model, such as its size and context, whether it is in memory or not.

        Raises:
            KtError: its files are damaged, or not there any more.
        """
        loaded = None if source.adapter else self.residency.find(source)
        return loaded.facts if loaded else await asyncio.to_thread(source.facts)

    async def abilities_of(self, source: ModelSource, facts: ModelFacts) -> ModelAbilities:
        """Returns the chat template, capabilities and settings of a model, in memory or not; its text files are read
        once.

        Raises:
            KtError: its files are damaged.
        """
        key = source.key, facts.identity
        if (found := self.abilities.get(key)) is None:
            if (loaded := self.residency.find(source)) is not None:
                answers = loaded.model.answers
            else:
                tokenizer = await asyncio.to_thread(source.read_tokenizer)
                answers = await self.jobs.result(
                    lambda: AnswerFormat.of(source.read_text_model(tokenizer))
                )
            found = await self.jobs.result(lambda: ModelAbilities.of(answers))
            if facts.pooling is not None:
                found = found._replace(capabilities=[facts.task])
            self.abilities[key] = found
        return found

    async def rows(self, row: Callable[[ModelSource, ModelFacts, str], T]) -> list[T]:
        """Returns the result of `row` for each listed model, called with the model, its facts and its name, and for the
        server's own with each of its aliases, too; damaged models are left out."""
        found = []
        for each in await self.listed():
            more = self.rules.aliases if each is self.catalogue.own else ()
            with contextlib.suppress(KtError):
                facts = await self.facts(each)
                found += [row(each, facts, name) for name in (each.name, *more)]
        return found

    async def lease(self, name: str, keep_s: float | None = None) -> Lease:
        """Returns a lease of the model that a request names, loading it if necessary; the model stays in memory until
        the lease is released.

        Args:
            keep_s: the seconds for which the model stays in memory afterwards; None: as before.
        Raises:
            Refusal: see `named`; or the model cannot be loaded.
            QueueFull, Busy, KtError: see `Residency.lease` and, for an adapter, `ServedAdapters.borrow`.
        """
        source = await self.named(name)
        lease = await self.residency.lease(source, keep_s)
        try:
            if source.adapter:
                assert lease.model.adapters is not None
                digest = await asyncio.to_thread(adapter_digest, source.adapter)
                lease.adapter = await lease.model.adapters.borrow(source.adapter, digest)
                lease.name = source.name
            lease.preset = await self.preset(name, source)
        except BaseException:
            lease.release()
            raise
        return lease

    async def preset(self, name: str, source: ModelSource) -> Preset:
        """Returns the settings that a request's model name presets, over the server's defaults. A name of the server's
        own model that presets nothing has the settings of the name with which the server was started."""
        found = await self.catalogue.preset(name)
        own = self.rules.preset if source is self.catalogue.own else NOTHING
        return (found or own).over(self.rules.defaults)

    async def generation(
        self, lease: Lease, make: PromptSource, options: AnswerOptions
    ) -> Generation:
        """Makes a prompt on the main thread and submits it to the model's engine; returns the generation, whose answers
        have begun.

        Raises:
            KtError, Refusal: the prompt cannot be made, or see `answer`.
        """
        _require_texts(lease.model)
        return await self.answer(lease, await self.prompt(lease.model, make), options)

    async def answer(
        self,
        lease: Lease,
        prompt: EncodedPrompt,
        options: AnswerOptions,
        names: FieldNames = OWN_NAMES,
    ) -> Generation:
        """Submits a prompt to the model's engine; returns the generation, whose answers have begun. Constraints are
        compiled meanwhile.

        The generation has a lease of its own until its answers have ended.

        Args:
            names: what the request calls the fields of its options.
        Raises:
            KtError: see `EngineThread.submit`.
            Refusal: the model generates no text, or the answers cannot be constrained as the options ask.
        """
        _require_texts(lease.model)

        def submit(constraints: Sequence[Constraint]) -> Generation:
            made = Generation(lease, prompt, options, self.metrics, constraints)
            if self.recorder is not None:
                space = recorded_space(lease, options.salt)
                made.ended = self.recorder.begin(space, prompt.ids)
            self.answering[made.id] = made
            return made

        model, shape = lease.model, options.shape
        with about(names["logit_bias"]):
            options.sampling.require_within(model.backend.engine.spec.vocab)
        with about(names["stop_token_ids"]):
            require_ids(options.stop_ids, model.backend.engine.spec.vocab)
        calls, before = model.answers.calls, None if options.plain else prompt.text
        if shape is None or not shape.holds(calls):
            return submit(())
        held, grammars = shape, model.grammars
        with about(held.field):
            if options.endless:
                other = names["ignore_eos"]
                raise UsageError(f"{held.field} and {other} cannot be used together")
            compile = lambda: grammars.constraints(held, calls, before, options.choices)  # noqa: E731
            return await submitted(grammars, held.field, compile, submit, options.choices)

    async def prompt(self, model: ServedModel, make: PromptSource) -> EncodedPrompt:
        """Returns the prompt that `make` makes for the model, called on the main thread.

        Raises:
            KtError, Refusal: it cannot be made.
        """
        return await self.jobs.result(lambda: make(model.prompts))


def recorded_space(lease: Lease, salt: str = "") -> str:
    """Returns the key of a request's cache space: prompts share blocks only if model, adapter and salt are the same."""
    return "\0".join((lease.model.backend.pack, lease.name, salt))


def _require_texts(model: ServedModel) -> None:
    """Checks that a model generates text. Raises: Refusal: it makes embeddings."""
    if model.backend.engine.spec.embeds:
        instead = "use /v1/embeddings or /api/embed, or another model"
        said = f"{model.name} produces embeddings, not text: {instead}"
        raise bad_value("model", said)


def state_of(request: Request) -> ServerState:
    """Returns the state of the server that received a request: its models, rules and counters."""
    found: ServerState = request.app.state.server
    return found


def caller_of(request: Request) -> str:
    """Returns the text by which the client of a request is known: the header with its API key, else its address; empty:
    neither."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    return key or (request.client.host if request.client else "")


def owner_of(request: Request) -> str:
    """Returns the name of a request's API key; empty: it has none, as where the server has no keys."""
    found: str = request.scope.get(KEY_NAME, "")
    return found
