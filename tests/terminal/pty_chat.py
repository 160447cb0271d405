"""An interactive chat with the fake engine, for the terminal tests: python pty_chat.py FOLDER [full]."""

import resource
import sys
import time
from pathlib import Path

from chat.fake_engine import FakeEngine, backend

from ktcli.chat.chat import Chat
from ktcli.output import out
from ktcli.terminal import slash
from ktcli.terminal.prompt import Prompt
from ktcli.terminal.repl import talk
from ktcli.terminal.screen import Screen

SLOW_S = 0.05  # per token of a long answer, so that there is time to press Ctrl-C
slow = False


def script(question: str) -> str:
    global slow
    slow = question == "long"
    if slow:
        return "word " * 400
    if question == "evil":
        return "\x1b]0;owned\x07<think>\x1b[31mhm</think>[bold]ok[/bold]"
    return f"you said {question.encode()}"


class SlowEngine(FakeEngine):
    def run(self, batch):
        time.sleep(SLOW_S if slow and batch.runs[0].ids.size == 1 else 0)
        return super().run(batch)


def main(folder: Path, disk: str = "") -> None:
    model = backend(folder, script)
    engine = model.engine
    assert isinstance(engine, FakeEngine)
    engine.__class__ = SlowEngine
    chat = Chat(model)
    screen = Screen(sys.stdout, terminal=True, colour=True)
    if disk == "full":  # not a byte more in any file
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    talk(chat, Prompt(folder / "history", slash.words, out.warn), screen, out)
    print(f"LEFT after {len(chat.conversation.turns)} messages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
