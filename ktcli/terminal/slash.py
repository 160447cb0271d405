"""The table of the commands that can be typed after a slash in an interactive chat.

A command gets the `ReplState` (the chat, and a way to speak to the person) and the rest of its line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import wrap

from ktcli.chat.chats import LAST, newest, saved_names
from ktcli.chat.compaction import exchanges
from ktcli.chat.conversation import NOTHING_OMITTED
from ktcli.chat.worktimes import time_lines
from ktcli.errors import UsageError
from ktcli.interrupt import Interrupt
from ktcli.records import dataclass
from ktcli.terminal import slash_files as files
from ktcli.terminal.adjust import OF_SCREEN, SETTABLE, changed, show_otherwise, shown, silent_seed
from ktcli.terminal.replstate import ReplState
from ktcli.terminal.statusline import cached_line, in_ascii, six_lines

_HELP_COLUMN = 26  # where meanings begin

# What keys do, for /help.
KEYS = (
    ("Alt-Enter", 'insert a line break; so do \\ at the end of a line and """ around a text'),
    ("Tab", "complete a command, a setting, a chat or a file"),
    ("Ctrl-R", "search the input history; Up and Down step through it"),
    ("Ctrl-X Ctrl-E", "write the question in your editor"),
    ("Ctrl-C", "stop an answer; at the prompt, clear the line"),
    ("Ctrl-D", "leave"),
)


@dataclass(frozen=True, slots=True)
class Slash:
    """A command: its function, its syntax, and its meaning in words."""

    run: Callable[[ReplState, str], None]
    usage: str
    meaning: str


def _help(repl: ReplState, rest: str) -> None:
    width = repl.screen.columns - 1
    typed = [(f"/{name} {slash.usage}", slash.meaning) for name, slash in TABLE.items()]
    lines = [line for words, meaning in [*typed, *KEYS] for line in _beside(words, meaning, width)]
    repl.say("\n".join(lines))


def _beside(words: str, meaning: str, width: int) -> list[str]:
    """Words and their meaning beside them, or below where a terminal is too narrow for that."""
    if width < 2 * _HELP_COLUMN:
        return [
            f"  {words}",
            *wrap(
                meaning, max(width, _HELP_COLUMN), initial_indent="    ", subsequent_indent="    "
            ),
        ]
    indent = " " * _HELP_COLUMN
    return wrap(
        meaning, width, initial_indent=f"  {words}".ljust(_HELP_COLUMN), subsequent_indent=indent
    )


def _system(repl: ReplState, rest: str) -> None:
    if rest:
        repl.chat.conversation.system = "" if rest in ('""', "''", "none") else rest
    repl.say(f"system: {repl.chat.conversation.system or '(none)'}")


def _clear(repl: ReplState, rest: str) -> None:
    kept = repl.recorder.path if repl.chat.conversation.turns else None
    repl.chat.conversation.clear()
    repl.recorder.begin()
    repl.say("a new conversation" + (f"; /load {kept.stem} returns to the old one" if kept else ""))


def _undo(repl: ReplState, rest: str) -> None:
    question = repl.chat.conversation.undo()
    repl.say("there is nothing to undo" if question is None else f"undone: {question}")


def _compact(repl: ReplState, rest: str) -> None:
    if rest not in ("", "undo"):
        raise UsageError(
            f"/compact {rest[:40]}: unknown argument", hint="/compact, or /compact undo"
        )
    said = repl.chat.conversation
    if rest:
        if not said.omitted.turns:
            raise UsageError("nothing has been summarized in this conversation")
        said.omitted = NOTHING_OMITTED
        repl.say("the next answer reads the whole conversation again")
        return
    with Interrupt() as interrupt:
        repl.screen.begin(int)
        try:
            turns = repl.chat.compact(cancelled=interrupt, progress=repl.screen.reading)
        finally:
            repl.screen.end()
    if not turns:
        repl.say("(stopped; nothing has changed)")
        return
    repl.say(f"replaced {exchanges(turns)} with a summary; /compact undo restores them:")
    repl.say(said.omitted.summary)


def _model(repl: ReplState, rest: str) -> None:
    if repl.models is None:
        raise UsageError("this chat supports only one model")
    if rest:
        repl.models.go_to(rest)
        return
    rows = repl.models.names()
    wide = max(len(name) for name, _ in rows)
    repl.say("\n".join(f"  {name:<{wide}}  {about}".rstrip() for name, about in rows))


def _retry(repl: ReplState, rest: str) -> None:
    if not repl.chat.conversation.turns:
        raise UsageError("there is no question to retry")
    repl.again = True


def _stats(repl: ReplState, rest: str) -> None:
    reply, chat = repl.chat.reply, repl.chat
    lines = []
    if reply is not None:
        lines += [six_lines(reply.stats), cached_line(reply.stats)]
        if (laps := reply.laps) is not None:
            lines.append(time_lines(*laps))
    if chat.totals.answers:
        lines.append(chat.totals.lines)
    of = "" if chat.context is None else f" of {chat.context}"
    lines.append(f"context:              {chat.used}{of} token(s)")
    for line in lines:
        repl.say(in_ascii(line) if repl.screen.ascii else line)


def _thoughts(repl: ReplState, rest: str) -> None:
    repl.say(repl.screen.thoughts.strip() or "the last answer has no thoughts")


def _edit(repl: ReplState, rest: str) -> None:
    questions = repl.questions
    if not questions:
        raise UsageError("there is no question to edit yet", hint="ask something first")
    number = len(questions) if not rest else int(rest) if rest.isdecimal() else 0
    if not 1 <= number <= len(questions):
        raise UsageError(
            f"/edit {rest[:40]}: there is no such question",
            hint=f"questions are numbered from 1 to {len(questions)}; /edit alone edits the last one",
        )
    repl.editing, repl.draft = number - 1, questions[number - 1]


def _exit(repl: ReplState, rest: str) -> None:
    repl.leaving = True


def _set(repl: ReplState, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name = name.replace("_", "-")
    if name in OF_SCREEN:
        show_otherwise(repl.screen, name, value.strip())
    elif name:
        repl.chat.settings = changed(repl.chat.settings, name, value.strip())
    repl.say(shown(repl.chat.settings, repl.screen))
    if name == "seed" and (silent := silent_seed(repl.chat.settings.sampling)):
        repl.say(silent)
    if name == "think-budget" and not repl.chat.thinks:
        repl.say(
            f"think-budget has no effect: {repl.chat.model.name} does not think before it answers"
        )


TABLE: dict[str, Slash] = {
    "help": Slash(_help, "", "this list"),
    "system": Slash(_system, "[TEXT]", "show or set the system text; 'none' removes it"),
    "model": Slash(
        _model, "[NAME]", "switch to another model; without a name, list the models on disk"
    ),
    "set": Slash(_set, "[NAME VALUE]", "show or change settings"),
    "clear": Slash(_clear, "", "start a new conversation"),
    "retry": Slash(_retry, "", "answer the last question again"),
    "edit": Slash(_edit, "[N]", "edit the last question, or question N, and ask it again"),
    "undo": Slash(_undo, "", "remove the last question and its answer"),
    "compact": Slash(_compact, "[undo]", "summarize the oldest turns to make room"),
    "thoughts": Slash(_thoughts, "", "show the thoughts before the last answer"),
    "stats": Slash(_stats, "", "show the cost of the last answer and where its time went"),
    "read": Slash(files.attach, "FILE", "attach a file to the next question, as @FILE in it does"),
    "copy": Slash(files.copy, "[code]", "copy the last answer, or its last block of code"),
    "export": Slash(files.export, "FILE", "export the conversation as .md or .json"),
    "save": Slash(files.keep_copy, "NAME", "save a copy of the conversation in the library"),
    "load": Slash(files.go_on_with, "NAME", "continue a saved conversation"),
    "fork": Slash(files.fork, "[NAME]", "continue from here in a new conversation"),
    "rename": Slash(files.rename, "NAME", "rename the conversation"),
    "exit": Slash(_exit, "", "leave"),
}
ALIASES = {"branch": "fork", "quit": "exit", "bye": "exit", "?": "help"}


def run(repl: ReplState, line: str) -> None:
    """Runs a slash command of the chat; `line` has its name and arguments: "/save NAME".

    Raises:
        UsageError: there is no such command. KtError: the command failed.
    """
    name, _, rest = line[1:].partition(" ")
    slash = TABLE.get(ALIASES.get(name, name))
    if slash is None:
        raise UsageError(
            f"unknown command /{name}",
            hint="/help lists them; to send it as text, put a space before it",
        )
    slash.run(repl, rest.strip())


def words(
    before: str, models: Callable[[], Sequence[str]] = lambda: ()
) -> Sequence[tuple[str, str]]:
    """Returns the words that can be the last of a line that begins with a slash, however that word begins: pairs of a
    word and its meaning; [] if none is known.

    Args:
        before: the line up to the cursor.
        models: returns the names of the models that the chat can switch to.
    """
    command, space, rest = before.partition(" ")
    if not space:
        return [(f"/{name}", slash.meaning) for name, slash in TABLE.items()]
    if " " in rest:
        return []
    if command == "/set":
        return [(name, "") for name in (*SETTABLE, *OF_SCREEN)]
    if command == "/load":
        last = [(LAST, "the newest")] if newest() else []
        return [*last, *((name, "") for name in saved_names() if name != LAST)]
    if command == "/model":
        return [(name, "") for name in models()]
    if command == "/save":
        return [(name, "") for name in saved_names()]
    if command == "/compact":
        return [("undo", "read all turns again")]
    if command == "/copy":
        return [("code", "its last block of code")]
    return []
