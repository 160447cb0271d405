"""The text files of a model: what is needed to write its prompts and to read its answers."""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ktcli.records import dataclass
from ktcli.resources import data_path
from ktcli.store.entry import BUILTIN
from ktcli.text.around import NOTHING_AROUND, AroundText
from ktcli.text.capabilities import Capabilities
from ktcli.text.control import ControlTokens
from ktcli.text.files import read_json_if_any
from ktcli.text.rows import KnownRows, read_rows
from ktcli.text.settings import (
    Settings,
    read_added,
    read_around_text,
    read_settings,
    read_stop_ids,
    unused_settings,
)
from ktcli.text.template import ChatTemplate, load_template, makes_embeddings
from ktcli.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text files of a model, read.

    Attributes:
        control: keeps words of a conversation from becoming control tokens.
        stop_ids: the ids of tokens that end an answer.
        settings: the model's own settings.
        begin: the ids in front of a text outside any turn; a template writes its own.
        around: the ids before and behind a text of which an embedding is made.
        embeds: whether it makes embeddings and generates no text.
        response_template: how the checkpoint says that its answers are read, unchecked; None: it does not.
        unused: a sentence on each of the model's own settings that is not used.
        rows: what it is told of kt's tables, where a question names a row; None: it is not the built-in model.
        can: what its chat template can do.
    """

    tokenizer: Tokenizer
    control: ControlTokens
    template: ChatTemplate
    stop_ids: frozenset[int]
    settings: Settings
    response_template: Any = None
    begin: tuple[int, ...] = ()
    rows: KnownRows | None = None
    unused: tuple[str, ...] = ()
    around: AroundText = NOTHING_AROUND
    embeds: bool = False
    can: Capabilities = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "can", Capabilities(self.template))

    @property
    def may_think(self) -> bool:
        """Whether the chat template writes different prompts with thinking on and off, so that the model can do
        both.
        """
        hello = [{"role": "user", "content": "hi"}]
        ways = (replace(self.settings, thinking=thinking) for thinking in (True, False))
        return len({self.template.render(hello, **way.variables) for way in ways}) > 1


def read_trained_texts(name: str, folder: Path) -> TextModel:
    """Returns the text files of a model (tokenizer, chat template, settings) as fine-tuning uses them: without the
    answers in kt's own tables, and with an empty chat template if there is none. Raises as `read_text_model`.
    """
    return replace(read_text_model(name, folder, chats=False), rows=None)


def read_text_model(
    name: str,
    folder: Path,
    *,
    allow_special: bool = False,
    tokenizer: Tokenizer | None = None,
    chats: bool = True,
) -> TextModel:
    """Returns the text files of a model, read: tokenizer, chat template, stop ids, settings.

    Args:
        name: of the model; the built-in one also gets the answers in kt's own tables.
        allow_special: whether texts of a conversation may contain control tokens.
        tokenizer: the model's, if it was read before.
        chats: whether it must have a chat template.
    Raises:
        BadCheckpoint: the tokenizer, template or settings are missing, damaged or hostile.
    """
    tokenizer = tokenizer or load_tokenizer(folder)
    template = load_template(folder, name=name, chats=chats)
    begin = read_added(folder, tokenizer, "bos")
    return TextModel(
        tokenizer,
        ControlTokens(tokenizer, allowed=allow_special),
        template,
        read_stop_ids(folder, tokenizer, template),
        read_settings(folder),
        read_json_if_any(folder / "tokenizer_config.json").get("response_template"),
        begin,
        read_rows(data_path("profiles", BUILTIN)) if name == BUILTIN else None,
        unused_settings(folder),
        read_around_text(folder, tokenizer, begin),
        makes_embeddings(folder),
    )
