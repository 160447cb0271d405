"""What a `kt chat` command line requests: the options of answers, their form, and the conversation to continue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktcli import config, smallfiles
from ktcli.commands.cli.declarations import exclusive
from ktcli.errors import NotFound, UsageError
from ktcli.output import out
from ktcli.records import dataclass
from ktcli.store import library
from ktcli.store.entry import BUILTIN

if TYPE_CHECKING:
    from ktcli.answers.grammar.form import Form
    from ktcli.commands.chat.options import ChatOptions
    from ktcli.engine.drafting import DraftOptions
    from ktcli.text.settings import Settings

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")  # that are settings, too


@dataclass(frozen=True, slots=True)
class KeptChat:
    """A saved conversation to continue.

    Attributes:
        model: the name of its model.
        server: the address of the server that has it; empty: it is here, or a file from elsewhere says so.
    """

    path: Path
    model: str
    server: str = ""


def kept_chat(last: bool, name: str | None) -> KeptChat | None:
    """Returns the saved conversation that --continue (`last`) or --resume (`name`) means, as its file, model and
    server; None if neither was given.

    Raises:
        UsageError: both were given, the name means several or none is chosen, or the file is no conversation.
        NotFound: there is none.
    """
    if last and name is not None:
        raise exclusive("--continue", "--resume")
    if not last and name is None:
        return None
    from ktcli.chat.chats import chats_folder, find, load, newest_readable
    from ktcli.commands.chats import chosen

    if last:
        path, saved, aside = newest_readable()
        for other in aside:
            out.warn(f"{other.name} is not a conversation that kt can read, so it is skipped")
    else:
        path = find(name) if name else chosen()
        saved = load(path)
    # A file from elsewhere may name a model, but no folder of this machine.
    mine = path.parent.samefile(chats_folder()) if chats_folder().is_dir() else False
    named = (saved.identity.asked if mine else "") or saved.model
    server = saved.identity.server if mine else ""
    foreign = not mine and "/" in named
    return KeptChat(path, BUILTIN if foreign else named or BUILTIN, server)


def preferred_settings(settings: Settings) -> Settings:
    """Returns the settings of a model for its answers, with the user's own where kt's settings or environment variables
    have any; command-line options are not considered.

    Raises:
        UsageError: a setting has an invalid value.
    """
    from ktcli.chat.compaction import STOP

    thinking, stop = config.value("think"), config.value("stop")
    sampling = {name: config.value(name.replace("_", "-")) for name in _SAMPLING}
    return replace(
        settings.sampled(**sampling),
        stops=settings.stops if stop is None else (stop,),
        max_tokens=config.value("max-tokens") or settings.max_tokens,
        thinking=settings.thinking if thinking is None else thinking,
        drops=config.value("when-full") != STOP,
        think_budget=config.value("think-budget"),
    )


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """The options of the command line for answers."""

    sampling: dict[str, Any]
    answers: ChatOptions
    stats: bool
    draft: DraftOptions
    allow_special: bool = False
    streams_json: bool = False
    output: Path | None = None  # the file for the answer's text
    explain_cache: bool = False
    kept: KeptChat | None = None  # to go on with
    form: Form | None = None  # what answers are held to

    def over(self, settings: Settings) -> Settings:
        """Returns `settings`, those of a model or a saved conversation, overridden by the sampling, length, stop
        strings and thinking that the command line gives.
        """
        given = self.answers
        return replace(
            settings.sampled(**self.sampling),
            max_tokens=given.max_tokens or settings.max_tokens,
            stops=tuple(given.stop or ()) or settings.stops,
            thinking=settings.thinking if given.think is None else given.think,
            think_budget=given.think_budget or settings.think_budget,
        )

    @property
    def model(self) -> str:
        """The name of the model if the command line names none: that of the saved conversation, else of the setting
        model, else the built-in one.
        """
        return self.kept.model if self.kept else config.value("model") or BUILTIN

    @contextmanager
    def telling_whose_model(self, model: str) -> Iterator[None]:
        """Opens a context in which a NotFound or UsageError gets a hint about the setting that named `model`, if a
        setting did.
        """
        said = config.stated("model")
        try:
            yield
        except (NotFound, UsageError) as error:
            if self.kept is None and said.text and model == self.model:
                error.hint = f"{said.words} asks for it; {said.undo} changes that"
            raise

    def require_model(self) -> None:
        """Raises an error unless the model of a saved conversation is in the library; a file must not cause a download.

        Raises:
            NotFound: it is not.
        """
        if self.kept is not None and library.find(self.model) is None:
            raise NotFound(
                f"the model of the chat {self.kept.path.stem}, {self.model[:100]}, is not available",
                hint=f"get it with: kt pull {self.model[:100]}; kt chat MODEL --resume "
                f"{self.kept.path.stem} uses another model",
            )


FORMATS = ("json",)
_MOST_BYTES = 1 << 20  # of the file; blanks and all


def asked_form(schema: Path | None, format: str | None) -> Form | None:
    """Returns the form of answers, such as a JSON schema, that --schema or --format asks for; None if neither is given.
    It is checked before a model is loaded.

    Raises:
        UsageError: both were given, the format is unknown, the file cannot be read, or the schema cannot be used.
    """
    if schema is None and format is None:
        return None
    if schema is not None and format is not None:
        raise exclusive("--schema", "--format")
    from ktcli.answers.grammar.compiler import require_sound
    from ktcli.answers.grammar.form import Form

    if schema is None:
        if format not in FORMATS:
            raise UsageError(f"--format must be {', '.join(FORMATS)}, not {str(format)[:40]!r}")
        return Form.of_object("--format")
    form = Form.of_schema(_text_of(schema), "--schema")
    require_sound(form)
    return form


def _text_of(path: Path) -> str:
    try:
        return smallfiles.read_start(path, _MOST_BYTES).decode()
    except OSError as error:
        raise UsageError(f"--schema: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--schema: {path} is not UTF-8 text (byte {error.start})") from error
