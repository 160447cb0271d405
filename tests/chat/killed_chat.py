"""A chat that goes on until it is killed, and prints what it says: python killed_chat.py FOLDER."""

import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chat.fake_engine import backend
from chat.test_recorder import Nobody

from ktcli.answers.events import AnswerPiece
from ktcli.chat.chat import Chat
from ktcli.terminal.repl import talk


def say(text: str) -> None:
    os.write(1, text.encode())


class Person(Nobody):
    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._before = ""

    def ask(self, draft: str = "") -> str:
        number = next(self._numbers)
        self._before = "\n" * bool(number) + f"question {number}\n"
        return f"question {number}"

    def piece(self, piece: AnswerPiece) -> None:
        """Shows the question with the first word of its answer, when it must be in the file."""
        say(self._before + piece.text)
        self._before = ""


if __name__ == "__main__":
    person = Person()
    model = backend(Path(sys.argv[1]), lambda question: "word " * 40)
    talk(Chat(model), person, person, person)  # type: ignore[arg-type]
