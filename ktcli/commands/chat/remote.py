"""`kt chat --server`: a chat with a model of a server, on the terminal or for one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ktcli import config
from ktcli.chat.remote import RemoteChat
from ktcli.client.serverclient import ListedModel, ServerClient
from ktcli.commands.chat.answering import answer_once, converse
from ktcli.commands.chat.request import AnswerRequest, preferred_settings
from ktcli.commands.chat.wording import PIPE, words_for_model
from ktcli.errors import DeviceError, KtError, NotFound, UsageError
from ktcli.output import out
from ktcli.text.settings import Settings

if TYPE_CHECKING:
    from ktcli.commands.chat.servers import AskedServer

_SHOWN = 20  # names in an error; a router may have hundreds


def chat_with(
    served: AskedServer,
    name: str | None,
    prompt: str | None,
    asked: AnswerRequest,
    needs_prompt: str,
) -> None:
    """Runs a chat with a model of a server: an interactive one if there is no prompt, else one question and its answer.

    Args:
        name, prompt: the model and the prompt as the command line has them.
        needs_prompt: an option that needs a prompt; empty: none.
    Raises:
        UsageError: the server has several models, and none is named. NotFound: it has none of this name.
        KtError: the server cannot be reached, or fails.
    """
    server = ServerClient(served.address, served.key, out.note)
    models = ServerModels(server)
    if prompt is None and name is not None and _is_prompt(name, models):
        name, prompt = None, name
    words = words_for_model(prompt, needs_prompt)
    model = models.chosen(name, asked)
    settings = asked.over(preferred_settings(Settings(stated=frozenset())))
    made = RemoteChat(server, model, settings, out.warn)
    made.form = asked.form
    said = (asked.answers.system, config.value("system"))
    made.conversation.system = next((text for text in said if text is not None), "")
    models.of(made)
    if words is None:
        converse(made, models, asked, f"a model of {server.url}")
    else:
        answer_once(made, words, asked)


def _is_prompt(word: str, models: ServerModels) -> bool:
    """Returns whether the only argument is a prompt: it is not a model of the server, and looks like a text."""
    if word == PIPE or not word.strip():
        return True
    return any(letter.isspace() for letter in word) and models.named(word) is None


class ServerModels:
    """The models of a server, between which its chat can switch: `/model`."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._listed = server.models()
        self._chat: RemoteChat | None = None

    def of(self, chat: RemoteChat) -> None:
        """Sets the chat that `go_to` switches to another of the server's models."""
        self._chat = chat

    def named(self, name: str) -> ListedModel | None:
        """Returns the listed model with this name, in which upper and lower case need not agree; None: the server does
        not list it.
        """
        found = self._listed or ()
        exact = (each for each in found if each.name == name)
        alike = (each for each in found if each.name.lower() == name.lower())
        return next(exact, None) or next(alike, None)

    def chosen(self, name: str | None, asked: AnswerRequest) -> ListedModel:
        """Returns the model of the server to chat with: the one called `name`; without a name that of the saved
        conversation or of the settings, if the server has it, else its only one. A server that does not list its models
        is believed to have the one that is named.

        Raises:
            NotFound: the server has none of this name, or none at all.
            UsageError: none is named, and it has several or does not list them.
        """
        if self._listed is None:
            if name is None and asked.kept is None:
                raise UsageError(
                    f"{self._server.url} does not say which models it has",
                    hint=f"name one: kt chat NAME --server {self._server.url}",
                )
            return ListedModel(name or asked.model)
        if not self._listed:
            raise NotFound(f"{self._server.url} has no model", hint="start it with one")
        if name is not None:
            return self._required(name)
        if (preferred := self.named(asked.model)) is not None:
            return preferred
        if len(self._listed) > 1:
            raise UsageError(
                f"{self._server.url} has several models: {self._names}",
                hint=f"name one: kt chat NAME --server {self._server.url}",
            )
        return self._listed[0]

    def names(self) -> Sequence[tuple[str, str]]:
        """Asks the server for its models; returns pairs of a name and a remark: "answers now" for the current model,
        empty for the others.
        """
        self._listed = self._server.models()
        now = self._chat.model.name if self._chat is not None else ""
        listed = [each.name for each in self._listed or ()]
        known = listed if now in listed or not now else [now, *listed]
        return [(each, "answers now" if each == now else "") for each in known]

    def known(self) -> Sequence[str]:
        """Returns the names of the models as the server listed them last; empty if it lists none."""
        return [each.name for each in self._listed or ()]

    def go_to(self, name: str) -> None:
        """Switches the chat to the server's model called `name`.

        Raises:
            NotFound: the server has none of this name. UsageError: it is already the current model. ServerFailed: the
                server cannot be reached.
        """
        assert self._chat is not None
        self._listed = self._server.models()
        found = ListedModel(name) if self._listed is None else self._required(name)
        if found.name == self._chat.model.name:
            raise UsageError(f"{found.name} is already the current model")
        self._chat.go_to(found)
        out.note(f"{found.name} answers from now on")

    def outlives(self, error: DeviceError) -> bool:
        """Returns False: a model on a server uses no GPU of this process that could fail, see `Models`."""
        return False

    def recover(self) -> None:
        """Raises KtError: the model is on a server, so this process has nothing to load again."""
        raise KtError("the model is on a server")

    def _required(self, name: str) -> ListedModel:
        """Returns the model of a name. Raises: NotFound: the server has none."""
        if (found := self.named(name)) is None:
            raise NotFound(
                f"{self._server.url} has no model {name[:200]!r}",
                hint=f"it has {self._names}; a text follows the name of a model, or has a space",
            )
        return found

    @property
    def _names(self) -> str:
        """The names for a sentence."""
        found = [each.name[:100] for each in self._listed or ()]
        more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
        return ", ".join(found[:_SHOWN]) + more
