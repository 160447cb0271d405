"""A loaded model for Python programs: `load` opens it, `generate` answers many prompts at once.

All that is asked of an engine, of `generate` and of conversations, goes through one scheduler: prompts are computed
together, and what one has in common with another is computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakSet

from ktcli import config
from ktcli.api.prompts import Prompt, PromptReader
from ktcli.api.result import GenerationResult
from ktcli.assembly.listener import Silent
from ktcli.assembly.presets import preset_over
from ktcli.assembly.request import DeviceWords, Wanted, placement_here
from ktcli.assembly.talking import Opening, OpenModel, give_back_memory, open_model, prepared
from ktcli.dialogue.answer import AnswerOptions
from ktcli.dialogue.local import LocalBackend
from ktcli.dialogue.many import PromptAnswer, ended
from ktcli.dialogue.shared import SharedScheduler
from ktcli.engine.scheduler import Limits
from ktcli.errors import NotFound, UsageError
from ktcli.hardware.gpu import AUTO, parse_device
from ktcli.ops.kvformat import FORMATS
from ktcli.store import aliases, library
from ktcli.store.entry import BUILTIN
from ktcli.store.reference import split_adapter
from ktcli.text.settings import Settings, override

LOG = logging.getLogger("ktcli")
LOG.addHandler(logging.NullHandler())  # else Python prints warnings of programs without any handler


def load(
    name: str = BUILTIN,
    *,
    device: str | None = None,
    context: int | None = None,
    threads: int | None = None,
    kv: str | None = None,
    parallel: int = 4,
    pull: bool = False,
) -> TextEngine:
    """Returns an engine with the model of this name, loaded into memory; the model is converted first if need be.

    Args:
        name: a name of the library or the catalogue, a repository, a folder or a file, as `kt chat` takes it, with an
            adapter or without.
        device: "auto", "cpu", "cuda" or "cuda:N"; None: the setting `device`, else "auto".
        context: the most tokens of a conversation; None: the model name's preset, the setting `context`, else as the
            plan for the memory allows.
        threads: the number of CPU threads; None: the setting `threads`, else one per performance core.
        kv: the number format of the KV cache, "bf16" or "fp8"; None: the setting `kv`, else "bf16".
        parallel: the number of prompts that are answered at the same time, each with the whole context; others wait.
        pull: whether a model that is not on this machine may be downloaded.
    Raises:
        NotFound: nothing has the name, or the model is not on this machine and `pull` is False.
        UsageError: an option does not suit this model or machine. NotEnoughMemory: the model does not fit.
        KtError: the download, the conversion or loading failed.
    """
    if parallel < 1:
        raise UsageError(f"parallel must be at least 1, not {parallel}")
    if context is not None and context < 1:
        raise UsageError(f"context must be at least 1, not {context}")
    device = device or config.value("device") or AUTO
    parse_device(device)
    kv = kv or config.value("kv") or "bf16"
    if kv not in FORMATS:
        raise UsageError(f"kv must be {' or '.join(FORMATS)}, not {kv[:40]!r}")
    model, _ = split_adapter(name)
    if not pull and library.find(model) is None:
        library.require_meaning(model)
        raise NotFound(
            f"{model} is not in the library",
            hint=f"get it with kt pull {model}, or with kt.load(..., pull=True)",
        )
    said = (context, aliases.preset_of(name).get("context"), config.value("context"))
    wanted = Wanted(
        next((each for each in said if each is not None), None),
        threads,
        cache=kv,
        streams=parallel,
        device=DeviceWords(device, config.value("gpus"), placement=placement_here()),
    )
    how = Opening(wanted, 0, False, listener=_Logged())
    return TextEngine(open_model(prepared(name, how), name, how), Limits(active=parallel))


class EngineUser(Protocol):
    """The interface of an object that holds a reference to the model of an engine: a conversation."""

    def leave(self) -> None:
        """Drops this object's reference to the engine's model, so that the model's memory can be freed."""


class TextEngine:
    """A loaded model that answers prompts: `kt.Engine`. For one thread at a time; close it, or use `with`."""

    def __init__(self, opened: OpenModel, limits: Limits) -> None:
        scheduler = SharedScheduler(opened.backend.engine, limits)
        self._opened, self._scheduler = opened, scheduler
        self._backend: LocalBackend | None = replace(opened.backend, shared=scheduler)
        self._users: WeakSet[EngineUser] = WeakSet()
        self.preset = aliases.preset_of(opened.backend.asked)
        self.name = opened.backend.name

    @property
    def backend(self) -> LocalBackend:
        """The chat backend of the loaded model, through which conversations send their prompts to this engine.

        Raises:
            UsageError: the engine is closed.
        """
        if self._backend is None:
            raise UsageError(f"the engine of {self.name} is closed")
        return self._backend

    @property
    def settings(self) -> Settings:
        """The settings for the model's answers, such as sampling, stop strings and length: the model's own, overridden
        by the preset of the name (such as an alias) under which it was loaded.
        """
        return preset_over(self.preset, self.backend.texts.settings)

    def require_open(self) -> None:
        """Raises UsageError if the engine is closed."""
        _ = self.backend

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its answer can have together."""
        return self.backend.engine.context

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        think: bool | None = None,
    ) -> list[GenerationResult]:
        """Returns the answers to prompts, which are computed together; each answer is the same as if its prompt had
        been given alone.

        Args:
            prompts: texts, which are continued as they are, and lists of messages ({"role": …, "content": …}), which
                are put into the model's chat template and answered.
            max_tokens: the most tokens of an answer; None: the model's own setting, else as many as the context holds.
            temperature: 0 always takes the likeliest token; None: the model's own sampling.
            stop: texts that end an answer; the answer does not contain them.
            seed: of the random numbers of each prompt; None: a new one in every call.
            think: whether a model that can do both thinks first; None: the model's own setting.
        Returns:
            The answers in the order of the prompts.
        Raises:
            UsageError: an argument is invalid, or the engine is closed.
            ContextFull: a prompt leaves no room for an answer; nothing was computed.
            KtError: the generation failed.
        """
        backend = self.backend
        settings = settings_over(self.settings, max_tokens, temperature, stop, seed, think)
        read = PromptReader(backend, settings.variables, self.preset).all(prompts)
        options = AnswerOptions(settings.sampling, settings.stops, settings.max_tokens)
        made = [
            PromptAnswer(
                backend.answers,
                prompt,
                replace(options, plain=isinstance(of, str)),
                self._scheduler,
            )
            for of, prompt in zip(prompts, read, strict=True)
        ]
        for _ in ended(made, self._scheduler):
            pass
        return [GenerationResult.of(each.run, each.pieces) for each in made]

    def join(self, user: EngineUser) -> None:
        """Registers an object, such as a conversation, whose `leave` is called when the engine is closed; it is held by
        a weak reference.
        """
        self._users.add(user)

    def close(self) -> None:
        """Cancels unfinished answers and frees the model's memory; a second call does nothing."""
        if self._backend is None:
            return
        self._backend = None
        try:
            for user in self._users:
                user.leave()
            self._scheduler.close()
            self._opened.close()
        finally:
            self._opened.forget()
            del self._scheduler  # it has the engine
            give_back_memory()

    def __enter__(self) -> TextEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Logged(Silent):
    """A listener that writes into the log of the program."""

    def note(self, text: str) -> None:
        """Logs a note."""
        LOG.info("%s", text)

    def warn(self, text: str) -> None:
        """Logs a warning."""
        LOG.warning("%s", text)

    def agree(self, offer: Iterable[str], command: str) -> None:
        """Agrees: `load` was told that it may."""


def settings_over(
    own: Settings,
    max_tokens: int | None,
    temperature: float | None,
    stop: str | Sequence[str],
    seed: int | None,
    think: bool | None,
) -> Settings:
    """Returns a model's settings for answers, `own`, overridden by the other arguments; where one is None (`stop`:
    empty), the model's own value stays.

    Raises:
        UsageError: a value is out of range.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UsageError(f"stop must be strings, not {str(text)[:40]!r}")
    return replace(
        own,
        sampling=override(own.sampling, temperature=temperature, seed=seed),
        max_tokens=own.max_tokens if max_tokens is None else max_tokens,
        stops=stops or own.stops,
        thinking=own.thinking if think is None else think,
    )
