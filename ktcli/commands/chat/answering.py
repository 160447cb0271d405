"""Answers one question from a command line (on the terminal, into a pipe, as JSON, or into a file), or talks to a
person on the terminal, whoever answers: a model here, one of the library's servers, or one elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ktcli import config
from ktcli.commands.chat.request import AnswerRequest
from ktcli.errors import ContextFull, UsageError
from ktcli.output import Mode, out

if TYPE_CHECKING:
    from ktcli.answers.events import AnswerPiece
    from ktcli.chat.base import BaseChat
    from ktcli.chat.recorder import ChatRecorder
    from ktcli.chat.reply import Reply
    from ktcli.terminal.replstate import Models, ReplState
    from ktcli.terminal.screen import Screen


def answer_once(made: BaseChat, words: str, asked: AnswerRequest) -> None:
    """Asks one question, prints its answer in the format of the options, and reports on stderr how it ended."""
    from ktcli.chat.recorder import ChatRecorder
    from ktcli.interrupt import Interrupt

    screen = AnswerEvents(sys.stdout) if asked.streams_json else screen_for(asked)
    with contextlib.ExitStack() as keeping, Interrupt() as interrupt:
        if asked.kept is not None:
            recorder = ChatRecorder(made, out.warn)
            _taken_over(recorder, made, asked)
            keeping.callback(recorder.close)
            keeping.enter_context(recorder.on_signals())
        screen.begin(
            lambda: made.answering.stats.tokens if made.answering else 0,
            cut=lambda: made.thought_cut,
        )
        said: dict[bool, str] = {True: "", False: ""}  # thoughts, and the answer
        try:
            for piece in made.ask(words, cancelled=interrupt, progress=screen.reading):
                said[piece.thought] += piece.text
                if out.mode is not Mode.JSON:
                    screen.piece(piece)
        except ContextFull as error:
            error.hint = f"ask about a part of it; {made.longer}"
            raise
        finally:
            if out.mode is not Mode.JSON:
                screen.end()
    if asked.output is not None:
        _write_output(asked.output, said[False])
    if interrupt.asked:
        raise KeyboardInterrupt
    reply = made.reply
    assert reply is not None
    if out.mode is Mode.JSON or asked.streams_json:
        shown = _documented(made, reply, said, asked)
        if isinstance(screen, AnswerEvents):
            screen.answer(shown)
        else:
            out.result(shown, "")
    _remark(made, reply, asked)


def _documented(
    made: BaseChat, reply: Reply, said: dict[bool, str], asked: AnswerRequest
) -> dict[str, Any]:
    """The document of an answer, whose thoughts and text `said` has, with what else was asked for."""
    answer, thinking = said[False], said[True].strip()
    shown = document(made, reply, answer.lstrip("\n") if said[True] else answer, thinking)
    if asked.explain_cache:
        shown["cache_loss"] = None if made.loss is None else asdict(made.loss)
    return shown


def _remark(made: BaseChat, reply: Reply, asked: AnswerRequest) -> None:
    """Says on stderr how an answer ended and, if asked, what it took."""
    from ktcli.chat.compaction import exchanges
    from ktcli.engine.request import Finish
    from ktcli.terminal.statusline import cached_line, six_lines

    if reply.finish is Finish.CONTEXT:
        hint = f"the answer was cut off; {made.longer}"
        out.warn(f"the context of {made.context or 0:,} tokens is full", hint=hint)
    if reply.dropped:
        out.warn(
            f"the context was full: {exchanges(reply.dropped)} were left out",
            hint="to have such a question refused instead: kt config set when-full stop",
        )
    if reply.finish is Finish.LENGTH:
        out.note(
            f"(cut at {len(reply.ids) or reply.stats.tokens:,} tokens; --max-tokens changes the limit)"
        )
    if reply.thought_cut:
        most = made.settings.think_budget or 0
        out.note(f"(thinking was stopped at {most:,} tokens; --think-budget changes the limit)")
    if asked.stats:
        sys.stderr.write(six_lines(reply.stats) + "\n")
        if reply.stats.reused_tokens:
            sys.stderr.write(cached_line(reply.stats) + "\n")
    if asked.explain_cache and made.loss is not None:
        out.note(made.loss.sentence)


def document(made: BaseChat, reply: Reply, text: str, thinking: str) -> dict[str, Any]:
    """Returns an answer as the document for --json: its "text" and "thinking", the generated token "ids", "model", the
    reason why it ended ("finish"), and "stats", with counts of tokens, seconds and tokens per second.
    """
    stats = reply.stats
    return {
        "text": text,
        "thinking": thinking,
        "ids": reply.ids,
        "model": made.model.name,
        **({"server": made.model.server} if made.model.server else {}),
        "finish": reply.finish.value,
        "thinking_cut": reply.thought_cut,
        "dropped_turns": reply.dropped,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "reused_by_tier": stats.reused_by_tier,
            "prompt_eval_count": stats.prefilled_tokens,
            "prompt_eval_duration_s": stats.prompt_s,
            "prompt_eval_rate": stats.prefilled_tokens / stats.prompt_s if stats.prompt_s else 0.0,
            "eval_count": stats.tokens,
            "eval_duration_s": stats.eval_s,
            "eval_rate": stats.tokens / stats.eval_s if stats.eval_s else 0.0,
            "steps": stats.steps,
            "drafted_count": stats.drafted,
            "accepted_count": stats.accepted,
            "tokens_per_step": stats.tokens_per_step,
            "seed": made.seed,
            "load_duration_s": made.totals.loading_s,
            "times": _times(reply),
        },
    }


def _times(reply: Reply) -> dict[str, dict[str, float]] | None:
    """Where the time went, in seconds."""
    laps = reply.laps
    if laps is None:
        return None
    return {
        name: {f"{part.replace(' ', '_')}_s": seconds for part, seconds in lap.rows}
        for name, lap in zip(("reading", "answering"), laps, strict=True)
    }


def _taken_over(recorder: ChatRecorder, made: BaseChat, asked: AnswerRequest) -> None:
    """Goes on with the kept conversation that was asked for, with the options of this command line."""
    assert asked.kept is not None
    recorder.take_over(asked.kept.path)
    put_over(made, asked)


def put_over(made: BaseChat, asked: AnswerRequest) -> None:
    """Overrides the settings and the system text of the chat `made`, a saved conversation, by those of the command
    line.
    """
    made.settings = asked.over(made.settings)
    if asked.answers.system is not None:
        made.conversation.system = asked.answers.system


def screen_for(asked: AnswerRequest) -> Screen:
    """Returns a `Screen` on standard output that draws answers with the Markdown, status line and view of thoughts that
    options and settings ask for.
    """
    from ktcli.commands.view.bars import can_draw
    from ktcli.terminal.screen import Screen, ThoughtsView

    stream = sys.stdout
    colour = bool(out.style("x", "dim", stream) != "x")
    terminal = stream.isatty() and out.mode is not Mode.JSON
    screen = Screen(stream, terminal=terminal, colour=colour)
    if terminal:
        screen.on_begin, screen.on_end = out.hold, out.release
    screen.markdown = config.value("markdown") is not False
    screen.status = config.value("status") is not False
    screen.ascii = not can_draw(stream)
    view = "hidden" if asked.answers.hide_thinking else config.value("thoughts")
    screen.view = ThoughtsView(view or ThoughtsView.FOLDED)
    return screen


class AnswerEvents:
    """Writes one JSON object per event to a stream, in ASCII, each flushed; has the interface of a `Screen`.

    The events are `reading` (tokens of the prompt), `text` (a piece, and whether it is a thought), and at the end
    `answer`, with the keys of --json.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, tokens: Callable[[], int], *, cut: Callable[[], bool]) -> None:
        """Does nothing: the start of an answer is no event in the JSON stream."""

    def reading(self, done: int, total: int) -> None:
        """Writes the JSON event "reading": `done` of the `total` tokens of the prompt have been read."""
        self._write({"event": "reading", "done": done, "total": total})

    def piece(self, piece: AnswerPiece) -> None:
        """Writes the JSON event "text": the next piece of an answer, and whether it is a thought."""
        self._write({"event": "text", "text": piece.text, "thought": piece.thought})

    def end(self) -> None:
        """Does nothing: `answer` writes the last JSON event."""

    def answer(self, document: dict[str, Any]) -> None:
        """Writes the JSON event "answer", the last one: the whole answer, with the keys of `document`."""
        self._write({"event": "answer", **document})

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).replace("\x7f", "\\u007f")  # the one control that JSON leaves
        self._stream.write(f"{line}\n")
        self._stream.flush()


def checked_output(path: Path) -> Path:
    """Returns the path of the file of --output with ~ expanded, after checking that it is new and its folder exists.

    Raises:
        UsageError: something of this name is there, there is no such folder, or ~USER names nobody.
    """
    try:
        path = path.expanduser()
    except RuntimeError:
        raise UsageError(f"--output {path} refers to the home folder of an unknown user") from None
    if os.path.lexists(path):
        raise _taken(path)
    if not os.path.isdir(path.parent):
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def _write_output(path: Path, answer: str) -> None:
    """Writes the text of an answer into a new file, in UTF-8, with a newline at the end.

    Raises:
        UsageError: a file came there meanwhile, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8", errors="replace", newline="") as file:
            file.write(answer.strip("\n") + "\n")
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from error


def _taken(path: Path) -> UsageError:
    return UsageError(f"--output {path}: it already exists", hint="choose another name")


def converse(made: BaseChat, models: Models, asked: AnswerRequest, place: str) -> None:
    """Runs an interactive conversation on the terminal until the user leaves.

    Args:
        place: where the model is, for people; empty: in this process.
    """
    from ktcli.terminal import slash
    from ktcli.terminal.prompt import MARK, MARK_IN_ASCII, Prompt
    from ktcli.terminal.repl import talk
    from ktcli.terminal.replstate import Remarks
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
