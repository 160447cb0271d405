"""`kt chat`: talk to a model, for one question or until the user leaves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import typer

from ktcli import config
from ktcli.commands.chat import options as chat_options
from ktcli.commands.chat.answering import answer_once, checked_output, converse
from ktcli.commands.chat.attaching import Attaching
from ktcli.commands.chat.request import AnswerRequest, asked_form, kept_chat, preferred_settings
from ktcli.commands.chat.servers import asked_server
from ktcli.commands.chat.wording import lasting_name, who_and_what, words_for_model
from ktcli.commands.cli.declarations import exclusive, preset_context
from ktcli.commands.cli.engine_options import EngineOptions
from ktcli.commands.cli.kv_store import KvStoreOptions, asked_store
from ktcli.commands.cli.options import AllowSpecialOpt, ContextOpt, JsonOpt, PullOpt, QuietOpt
from ktcli.output import out
from ktcli.store import aliases

if TYPE_CHECKING:
    from ktcli.assembly.request import Wanted
    from ktcli.assembly.talking import Opening
    from ktcli.chat.chat import Chat
    from ktcli.commands.chat.model_choice import ChatModel, ModelChoice
    from ktcli.dialogue.backend import ChatBackend
    from ktcli.engine.drafting import DraftOptions
    from ktcli.text.model import TextModel
    from ktcli.text.settings import Settings


def chat(
    here: typer.Context,
    *,
    name: chat_options.NameArg = None,
    prompt: chat_options.PromptArg = None,
    answers: chat_options.ChatOptions,
    resumed: chat_options.ResumeOptions,
    allow_special: AllowSpecialOpt = False,
    context: ContextOpt = None,
    options: EngineOptions,
    draft: chat_options.DraftOpt = None,
    no_kv_cache: chat_options.NoKvCacheOpt = False,
    store: KvStoreOptions,
    place: chat_options.ServerOptions,
    stats: chat_options.StatsOpt = False,
    explain_cache: chat_options.ExplainCacheOpt = False,
    json: JsonOpt = False,
    form: chat_options.FormOptions,
    yes: PullOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Talk to a model.

    If the model is missing, kt offers to pull it, and converts it. With a PROMPT, text on standard
    input, or both, kt prints one answer and exits; @FILE in a PROMPT includes that file. Sampling
    defaults are the model's own. In a chat, /help lists the commands.

    A chat on the terminal is saved as it goes; --continue and --resume continue it, with its model
    and settings unless you give others.

    If kt serve has already loaded the model from this library, kt chat uses that server, unless an
    option needs an engine of its own; --attach changes that. With --server, the model is one of
    another server, which NAME picks if it has several.

    Examples:

      kt chat

      kt chat "what does kt convert do?"

      kt chat qwen3-30b-a3b

      git diff | kt chat qwen3-30b-a3b "Review this change by @CONTRIBUTING.md"

      kt chat --continue

      kt chat --server http://10.0.0.7:8000 --server-key-file ~/key
    """
    sampling, needs_prompt = answers.sampling, form.needing_prompt(json=json)
    if no_kv_cache and store.kv_store is not None:
        hint = "leave one of them out; KT_CACHE=0 turns off only the pages on this machine's disk"
        raise exclusive("--no-kv-cache", "--kv-store", hint)
    asked = AnswerRequest(
        sampling, answers, stats, _draft_options(draft), allow_special, form.jsonl,
        explain_cache=explain_cache, kept=kept_chat(resumed.go_on, resumed.resume),
        output=None if form.output is None else checked_output(form.output),
        form=asked_form(form.schema, form.format),
    )  # fmt: skip
    server = asked_server(here, place.server, place.server_key_file, asked.kept)
    if server is not None:
        from ktcli.commands.chat.remote import chat_with

        chat_with(server, name, prompt, asked, needs_prompt)
        return
    model, prompt = who_and_what(name, prompt, asked.model)
    if model == asked.model:
        asked.require_model()
    words = words_for_model(prompt, needs_prompt)
    with asked.telling_whose_model(model):
        tokens = preset_context(here, aliases.preset_of(model), context)
    how = _opening(options.wanted(tokens), asked, None if no_kv_cache else store)
    _talk(model, words, asked, how, Attaching.of(here))


def _opening(wanted: Wanted, asked: AnswerRequest, store: KvStoreOptions | None) -> Opening:
    """How the model is opened; `store`: where KV pages are kept; None: nowhere."""
    from ktcli.assembly.kvpages import cache_quota
    from ktcli.assembly.talking import Opening

    quota, shared = (0, None) if store is None else (cache_quota(), asked_store(store))
    return Opening(wanted, quota, config.records_heat(), asked.allow_special, out, shared)


def _talk(
    model: str, words: str | None, asked: AnswerRequest, how: Opening, attaching: Attaching
) -> None:
    """Opens the model and answers once, or talks until the user leaves where there are no words."""
    with asked.telling_whose_model(model):
        opened = _opened(model, asked, how, attaching)
    made = _begun(opened, asked)
    with contextlib.closing(_choice(made, opened, how, asked, attaching)) as models:
        if words is None:
            converse(made, models, asked, opened.place)
        else:
            answer_once(made, words, asked)


def _draft_options(option: str | None) -> DraftOptions:
    from ktcli.engine.drafting import DraftOptions

    if option is not None:
        return DraftOptions.parse(option, "--draft")
    said = config.stated("draft")
    return DraftOptions.parse(said.text or None, said.source)


def _opened(model: str, asked: AnswerRequest, how: Opening, attaching: Attaching) -> ChatModel:
    from ktcli.answers.format import AnswerFormat
    from ktcli.assembly.talking import open_model, prepared, require_text

    ready = prepared(model, how)

    def hear(texts: TextModel) -> None:
        """Says which options mean nothing to this model; refuses one that generates no text."""
        require_text(ready.name, embeds=texts.embeds)
        if asked.answers.think is not None and not texts.may_think:
            flag = "--think" if asked.answers.think else "--no-think"
            out.warn(
                f"{flag}: the chat template of {ready.name} has no such option; it has no effect"
            )
        if asked.answers.think_budget is not None and not AnswerFormat.of(texts).thinks:
            out.warn(
                f"--think-budget: {ready.name} does not think before it answers; it has no effect"
            )

    name = lasting_name(model)
    return attaching.attach(ready, name, hear) or open_model(ready, name, how, hear)


def _begun(opened: ChatModel, asked: AnswerRequest) -> Chat:
    from ktcli.chat.chat import Chat

    backend = opened.backend
    made = Chat(backend, _settings(backend, asked), asked.draft)
    made.form = asked.form
    made.conversation.system = _system(backend, asked)
    sampling = made.settings.sampling
    if asked.sampling["seed"] is not None and sampling.is_greedy:
        out.warn(f"--seed {sampling.seed} has no effect: the most likely token is always chosen")
    return made


def _settings(backend: ChatBackend, asked: AnswerRequest) -> Settings:
    """The settings with which a chat with a model begins: its makers', the person's, its name's, those asked for."""
    from ktcli.assembly.presets import preset_over

    own = preferred_settings(backend.texts.settings)
    return asked.over(preset_over(aliases.preset_of(backend.model.asked), own))


def _system(backend: ChatBackend, asked: AnswerRequest) -> str:
    """The system text with which a chat with a model begins: the one asked for, its name's, the person's."""
    preset = aliases.preset_of(backend.model.asked)
    said = (asked.answers.system, preset.get("system"), config.value("system"))
    return next((text for text in said if text is not None), "")


def _choice(
    made: Chat, opened: ChatModel, how: Opening, asked: AnswerRequest, attaching: Attaching
) -> ModelChoice:
    from ktcli.commands.chat.model_choice import ModelChoice

    return ModelChoice(
        made,
        opened,
        how,
        lambda backend: _settings(backend, asked),
        lambda backend: _system(backend, asked),
        attaching.attach,
    )
