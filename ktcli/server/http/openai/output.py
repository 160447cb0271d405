"""The items of a response: thoughts, text and calls, one after the other, each sent as it grows."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ktcli.answers.events import AnswerPiece, CallArguments, CallBegins, CallEvent
from ktcli.dialogue.answer import Said
from ktcli.server.http.openai.chat import chance_of
from ktcli.text.tokenizer import Tokenizer

Item = dict[str, Any]
Seal = Callable[[str], str]  # returns thoughts as a sealed text
_THOUGHTS, _TEXT, _CALL = "reasoning", "message", "function_call"
_PREFIX = {_THOUGHTS: "rs", _TEXT: "msg", _CALL: "fc"}


class OutputItems:
    """The items of one answer; the last one may still grow.

    Args:
        event: makes an event of its kind and fields.
        name: what the ids of items have in common.
        seal: returns thoughts as a sealed text; None: none is wanted.
    Attributes:
        items: as the response has them.
        thought_tokens: the tokens of thoughts.
    """

    def __init__(
        self, event: Callable[..., bytes], tokenizer: Tokenizer, name: str, seal: Seal | None
    ) -> None:
        self._event, self._tokenizer, self._name = event, tokenizer, name
        self._seal = seal
        self.items: list[Item] = []
        self.thought_tokens = 0
        self._is_open = False
        self._chances: list[Item] = []  # of tokens whose text did not come yet

    def take(self, said: Said) -> bytes:
        """Adds pieces of the answer to the items; returns the server-sent events that say so, as bytes of the
        stream."""
        if said.token is not None and any(_is_thought(each) for each in said.events):
            self.thought_tokens += 1
        elif said.token is not None and said.token.chosen is not None:
            self._chances.append(chance_of(self._tokenizer, said.token))
        return b"".join(
            self._piece(each) if isinstance(each, AnswerPiece) else self._called(each)
            for each in said.events
        )

    def close(self, status: str = "completed") -> bytes:
        """Ends the last item, with this status; returns the server-sent events that say so, empty if no item is
        open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        said = {_THOUGHTS: self._close_thoughts, _TEXT: self._close_text, _CALL: self._close_call}
        return said[item["type"]](item) + self._of_item("response.output_item.done")

    def _piece(self, piece: AnswerPiece) -> bytes:
        return self._thought(piece.text) if piece.thought else self._text(piece.text)

    def _thought(self, text: str) -> bytes:
        data = b"" if self._is_at(_THOUGHTS) else self._begin_thoughts()
        self.items[-1]["summary"][0]["text"] += text
        kind = "response.reasoning_summary_text.delta"
        return data + self._of_part(kind, "summary_index", delta=text)

    def _text(self, text: str) -> bytes:
        data = b"" if self._is_at(_TEXT) else self._begin_text()
        part, chances = self.items[-1]["content"][0], self._chances
        part["text"] += text
        part["logprobs"] += chances
        self._chances = []
        kind = "response.output_text.delta"
        return data + self._of_part(kind, "content_index", delta=text, logprobs=chances)

    def _called(self, event: CallEvent) -> bytes:
        self._chances = []
        if isinstance(event, CallBegins):
            id = event.id or f"call_{secrets.token_hex(12)}"
            return self._begin(_CALL, {"arguments": "", "call_id": id, "name": event.name})
        if isinstance(event, CallArguments):
            self.items[-1]["arguments"] += event.text
            return self._of_place("response.function_call_arguments.delta", delta=event.text)
        return self.close()

    def _begin_thoughts(self) -> bytes:
        data = self._begin(_THOUGHTS, {"summary": []})
        part = {"type": "summary_text", "text": ""}
        self.items[-1]["summary"].append(part)
        kind = "response.reasoning_summary_part.added"
        return data + self._of_part(kind, "summary_index", part=part)

    def _begin_text(self) -> bytes:
        data = self._begin(_TEXT, {"role": "assistant", "content": []})
        part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        return data + self._of_part("response.content_part.added", "content_index", part=part)

    def _close_thoughts(self, item: Item) -> bytes:
        part = item["summary"][0]
        if self._seal is not None:
            item["encrypted_content"] = self._seal(part["text"]) or None
        done = "response.reasoning_summary_text.done"
        said = self._of_part(done, "summary_index", text=part["text"])
        return said + self._of_part(
            "response.reasoning_summary_part.done", "summary_index", part=part
        )

    def _close_text(self, item: Item) -> bytes:
        part = item["content"][0]
        about = {"text": part["text"], "logprobs": part["logprobs"]}
        said = self._of_part("response.output_text.done", "content_index", **about)
        return said + self._of_part("response.content_part.done", "content_index", part=part)

    def _close_call(self, item: Item) -> bytes:
        about = {"name": item["name"], "arguments": item["arguments"]}
        return self._of_place("response.function_call_arguments.done", **about)

    def _is_at(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _begin(self, kind: str, about: Item) -> bytes:
        data = self.close()
        id = f"{_PREFIX[kind]}_{self._name}_{len(self.items)}"
        self.items.append({"type": kind, "id": id, "status": "in_progress", **about})
        self._is_open = True
        return data + self._of_item("response.output_item.added")

    def _of_item(self, kind: str) -> bytes:
        return self._event(kind, output_index=len(self.items) - 1, item=self.items[-1])

    def _of_place(self, kind: str, **about: Any) -> bytes:
        at = len(self.items) - 1
        return self._event(kind, item_id=self.items[-1]["id"], output_index=at, **about)

    def _of_part(self, kind: str, index: str, **about: Any) -> bytes:
        return self._of_place(kind, **{index: 0}, **about)


def _is_thought(piece: AnswerPiece | CallEvent) -> bool:
    return isinstance(piece, AnswerPiece) and piece.thought
