"""Splits answers in channels, as gpt-oss writes them: thoughts, tool calls, and text for the reader.

An answer is a row of messages, each with a head of its own between special tokens:

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with the words `<|start|>assistant`, so an answer begins inside a head. Source: OpenAI's
description of the harmony format.
"""

from __future__ import annotations

import re

from ktcli.answers.calls.styles import IN_CHANNELS
from ktcli.text.detokenizer import Detokenizer
from ktcli.text.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL, _COMMENTARY, _RECIPIENT = "final", "commentary", "to="

_TOOL = re.compile(r"to=functions\.([^\s<]+)")


class Channels:
    """Splits ids into pieces (is it a thought, text); the headers of messages are not text.

    Args:
        prompt: the text before the answer; where it ends in a message, the answer goes on with that.
        calls: whether calls of tools are wanted, between the marks of `IN_CHANNELS`; else they are thoughts.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str = "", *, calls: bool = False) -> None:
        self._marks = {tokenizer.id_of(mark): mark for mark in (START, CHANNEL, MESSAGE, END)}
        self._tokenizer = tokenizer
        self._calls = calls
        # Ids of the parts of the message's head, between its marks.
        self._head: list[list[int]] = [[]]
        self._tool = ""  # that it calls
        self._channel: list[int] = []  # ids of the name of its channel
        self._gap = ""  # before the next text, if one was said already
        self._state = START  # the mark that was read last
        self._detokenizer = Detokenizer(tokenizer)
        head, said, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        if said and END not in prompt.rpartition(START)[2]:
            channel = head.partition(CHANNEL)[2]
            self._channel, self._state = tokenizer.encode(channel), MESSAGE
            self._head = [tokenizer.encode(head.replace(CHANNEL, " "))]

    @staticmethod
    def known_to(tokenizer: Tokenizer) -> bool:
        """Returns whether a model with this tokenizer writes its answers in channels, as gpt-oss does: it has their
        special tokens.
        """
        ids = {tokenizer.id_of(mark) for mark in (START, CHANNEL, MESSAGE, END)}
        return ids <= tokenizer.special_ids

    @property
    def thought(self) -> bool:
        """Whether the message being read is hidden from the user, as the model's reasoning is. Text in the channel of
        tool calls that is addressed to no tool is for the user.
        """
        head = self._tokenizer.decode(self._channel).split()
        if self._tool or not head or head[0] == FINAL:
            return False
        return head[0] != _COMMENTARY or _RECIPIENT in self._head_text()

    @property
    def thinks(self) -> bool:
        """Whether the next id is text of a message that is hidden from the user, such as the model's reasoning."""
        return self._state == MESSAGE and self.thought

    def feed(self, id: int) -> tuple[bool, str]:
        """Reads the next id; returns (whether it belongs to a thought, the text that it completes). The text is empty
        in a message's header, and while a character is unfinished.
        """
        mark = self._marks.get(id)
        if mark is None:
            if self._state == CHANNEL:
                self._channel.append(id)
            if self._state != MESSAGE:
                self._head[-1].append(id)
                return self.thought, ""
            return self._said(self._detokenizer.feed(id))
        is_call = bool(self._tool)
        thought, text = self._said(self._detokenizer.finish())
        text += self._end_of_call()
        if mark == END and thought:
            text += "\n\n"
        elif mark == END and self._state == MESSAGE and not is_call:
            self._gap = "\n\n"
        if mark in (START, CHANNEL):
            self._channel = []
        if mark == START:
            self._head = []
        if mark in (START, CHANNEL):
            self._head.append([])
        if mark == MESSAGE and (found := self._called()):
            self._tool = found
            thought, text = False, f"{IN_CHANNELS.begin}{found}{IN_CHANNELS.name_end}"
        self._state = mark
        return thought, text

    def _called(self) -> str:
        """Returns the tool that the head of the message names; empty: none, or nobody wants to know."""
        found = _TOOL.search(self._head_text()) if self._calls else None
        return found[1] if found else ""

    def _head_text(self) -> str:
        """Returns the head of the message; its marks, which end every word, are blanks."""
        return " ".join(self._tokenizer.decode(part) for part in self._head)

    def _said(self, text: str) -> tuple[bool, str]:
        """Returns a piece of the current message, apart from what was said before."""
        thought = self.thought
        if text and not thought and not self._tool:
            text, self._gap = self._gap + text, ""
        return thought, text

    def _end_of_call(self) -> str:
        ended, self._tool = self._tool, ""
        return IN_CHANNELS.end if ended else ""

    def finish(self) -> tuple[bool, str]:
        """Ends the answer; returns (whether it belongs to a thought, text) of the text that was held back."""
        thought, text = self._said(self._detokenizer.finish())
        return thought, text + self._end_of_call()
