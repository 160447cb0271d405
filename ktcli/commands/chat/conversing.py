"""Talks to a person on the terminal, whoever answers: a model here, one of the library's servers, or one elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ktcli import config
from ktcli.commands.chat.request import AnswerRequest
from ktcli.output import out

if TYPE_CHECKING:
    from ktcli.chat.base import BaseChat
    from ktcli.terminal.replstate import Models, ReplState


def converse(made: BaseChat, models: Models, asked: AnswerRequest, place: str) -> None:
    """Runs an interactive conversation until the user leaves.

    Args:
        place: where the model is, for people; empty: here.
    """
    from ktcli.commands.chat.once import put_over, screen_for
    from ktcli.terminal import slash
    from ktcli.terminal.prompt import MARK, MARK_IN_ASCII, Prompt
    from ktcli.terminal.repl import Remarks, talk
    from ktcli.terminal.slash_files import resume

    def go_on(repl: ReplState) -> None:
        assert asked.kept is not None
        resume(repl, asked.kept.path)
        put_over(made, asked)

    name = made.model.name
    who = f"{name}, {place}" if place else name
    out.note(f"{who}: /help lists commands, Ctrl-C stops an answer, Ctrl-D quits")
    screen = screen_for(asked)
    mark = MARK_IN_ASCII if screen.ascii else MARK
    words = partial(slash.words, models=models.known)
    prompt = Prompt(config.home() / "history", words, out.warn, mark)
    remarks = Remarks(asked.stats, asked.explain_cache)
    begin = go_on if asked.kept else None
    talk(made, prompt, screen, out, remarks=remarks, begin=begin, models=models)
