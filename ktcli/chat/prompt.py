"""The line a person types: history, several lines, completion of commands.

Enter sends, unless the text is open: it ends with a backslash or has an unclosed `\"""`. Alt-Enter is a
new line always, and pasted lines stay lines. prompt_toolkit is loaded here and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

QUOTES = '"""'
MARK = "› "
_STYLE = Style.from_dict({"mark": "ansicyan bold"})

# words(text before the cursor) → what could stand for the last word of it
Words = Callable[[str], Sequence[tuple[str, str]]]


def is_open(text: str) -> bool:
    """Whether Enter continues the text instead of sending it."""
    return text.endswith("\\") or text.count(QUOTES) % 2 == 1


def cleaned(text: str) -> str:
    """What was meant: without the marks that kept the text open."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 6:
        return stripped[3:-3].strip("\n")
    return text.replace("\\\n", "\n")


class Prompt:
    """Asks for lines on the terminal.

    Args:
        history: the file of earlier lines; it is kept in memory where the file cannot be written.
        words: completion of slash commands.
    """

    def __init__(self, history: Path, words: Words) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            completer=_Commands(words),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=lambda width, line, wrapped: "  ",
            style=_STYLE,
            enable_open_in_editor=True,
        )

    def ask(self) -> str | None:
        """The next text; empty after Ctrl-C; None when the person leaves (Ctrl-D)."""
        try:
            return cleaned(self._session.prompt([("class:mark", MARK)]))
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


class _Commands(Completer):
    """Completes the last word of a line that begins with a slash."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def get_completions(self, document: Document, event: Any) -> Iterator[Completion]:
        before = document.text_before_cursor
        if not before.startswith("/") or "\n" in before:
            return
        last = before.split(" ")[-1]
        for word, meaning in self._words(before):
            if word.startswith(last):
                yield Completion(word, start_position=-len(last), display_meta=meaning)


def _history(path: Path) -> History:
    """Lines of earlier chats, readable by their owner alone."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        return FileHistory(path)
    return InMemoryHistory()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # take the chosen word; the next Enter sends
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
