"""A model's text files, read: what it takes to write its prompts and read its answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ktcli.chat.calls.styles import CallStyle, style_of
from ktcli.chat.channels import Channels
from ktcli.chat.control import ControlTokens
from ktcli.chat.settings import Settings, read_settings, read_stop_ids
from ktcli.chat.stream import ANSWER
from ktcli.chat.template import ChatTemplate, load_template
from ktcli.chat.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Voice:
    """A model's text files, read.

    Attributes:
        control: keeps words of a conversation from becoming control tokens.
        stop_ids: the ids of tokens that end an answer.
        settings: the model's own settings.
    """

    tokenizer: Tokenizer
    control: ControlTokens
    template: ChatTemplate
    stop_ids: frozenset[int]
    settings: Settings

    @property
    def may_think(self) -> bool:
        """Tells whether the template listens to `Settings.thinking`."""
        hello = [{"role": "user", "content": "hi"}]
        ways = (replace(self.settings, thinking=thinking) for thinking in (True, False))
        return len({self.template.render(hello, **way.variables) for way in ways}) > 1

    @property
    def calls(self) -> CallStyle | None:
        """The way in which the model calls tools; None: it has none that is known."""
        return style_of(self.template.source)

    @property
    def thinks(self) -> bool:
        """Tells whether the model may think before it answers, as far as its files say."""
        known = self.tokenizer.id_of(ANSWER) is not None or Channels.known_to(self.tokenizer)
        return known or self.may_think


def read_voice(name: str, folder: Path, *, allow_special: bool = False) -> Voice:
    """Reads the text files of a model; it is cheap, so it comes before weights are converted or loaded.

    Args:
        allow_special: whether texts of a conversation may give control tokens.
    Raises:
        BadCheckpoint: the tokenizer, template or settings are missing, damaged or hostile.
    """
    tokenizer = load_tokenizer(folder)
    template = load_template(folder, name=name)
    stop_ids = read_stop_ids(folder, tokenizer, template)
    control = ControlTokens(tokenizer, allowed=allow_special)
    return Voice(tokenizer, control, template, stop_ids, read_settings(folder))
