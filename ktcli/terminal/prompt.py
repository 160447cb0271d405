"""Reads the lines that a user types: history, several lines, completion of commands.

Enter sends, unless the text is open: it ends with a backslash or has an unclosed `\"""`. Alt-Enter is a
new line always, and pasted lines stay lines. prompt_toolkit is loaded here and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

QUOTES = '"""'
MARK, MARK_IN_ASCII = "› ", "> "
_STYLE = Style.from_dict({"mark": "ansicyan bold"})

# words(text before the cursor) → the completions of its last word
Words = Callable[[str], Sequence[tuple[str, str]]]


def is_open(text: str) -> bool:
    """Returns whether Enter continues a typed text instead of sending it: it ends in a backslash, or triple quotes are
    open.
    """
    return text.endswith("\\") or text.count(QUOTES) % 2 == 1


def cleaned(text: str) -> str:
    """Returns a typed text without the marks that continue it on the next line: triple quotes around it, or backslashes
    at ends of lines.
    """
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 6:
        return stripped[3:-3].strip("\n")
    return text.replace("\\\n", "\n")


class Prompt:
    """Reads the user's texts on the terminal, with a history and completions.

    Args:
        history: the file of earlier lines; they are kept in memory where it cannot be written.
        words: completes slash commands.
        warn: called once with the reason why lines are not kept.
        mark: what stands before a line.
    """

    def __init__(
        self,
        history: Path,
        words: Words,
        warn: Callable[[str], None] = lambda text: None,
        mark: str = MARK,
    ) -> None:
        self._mark = mark
        self._history = _Lines(history)
        self._warn: Callable[[str], None] | None = warn
        self._session: PromptSession[str] = PromptSession(
            history=self._history,
            completer=_Commands(words),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=lambda width, line, wrapped: "  ",
            style=_STYLE,
            enable_open_in_editor=True,
            enable_suspend=True,
        )

    def ask(self, draft: str = "") -> str | None:
        """Asks for a text on the terminal and returns it; empty after Ctrl-C, None when the user leaves (Ctrl-D).

        Args:
            draft: the text that the line begins with.
        """
        try:
            return cleaned(self._session.prompt([("class:mark", self._mark)], default=draft))
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        finally:
            if self._history.refusal and self._warn:
                self._warn(f"input history is not saved: {self._history.refusal}")
                self._warn = None


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


class _Lines(FileHistory):
    """Keeps the lines of earlier chats, in a file that its owner alone can read.

    Attributes:
        refusal: why the file cannot be read or written, after which lines are kept in memory; empty: it can.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.refusal = ""
        with self._refused_at_most():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))

    def load_history_strings(self) -> Iterable[str]:
        with self._refused_at_most():
            return super().load_history_strings()
        return []

    def store_string(self, string: str) -> None:
        if not self.refusal:
            with self._refused_at_most():
                super().store_string(string)

    @contextlib.contextmanager
    def _refused_at_most(self) -> Iterator[None]:
        """Remembers why the system refuses, and raises nothing: these calls come from the drawing of the prompt."""
        try:
            yield
        except OSError as error:
            self.refusal = f"cannot write {self.filename!s}: {error.strerror}"


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
