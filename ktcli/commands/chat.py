"""`kt chat`: talk to a model, once or until the person leaves."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktcli import config
from ktcli.commands import answer_file
from ktcli.commands.answer_request import AnswerRequest, kept_chat, preferred_settings
from ktcli.commands.options import (
    AllowSpecialOpt,
    ContextOpt,
    DeferOpt,
    DeviceOpt,
    GpuExpertsOpt,
    JsonOpt,
    NumaOpt,
    PrefillThresholdOpt,
    QuietOpt,
    ThreadsOpt,
    setting_option,
)
from ktcli.commands.piped import is_piped, is_typed, standard_input
from ktcli.errors import ContextFull, DeviceError, NotFound, UsageError
from ktcli.hardware.gpu import AUTO
from ktcli.hardware.numa import asked_numa
from ktcli.output import Mode, out
from ktcli.settings import SETTINGS
from ktcli.store import library
from ktcli.store.entry import BUILTIN
from ktcli.store.reference import parse

if TYPE_CHECKING:
    from ktcli.assembly.prepare import Ready
    from ktcli.assembly.request import Wanted
    from ktcli.chat.chat import Chat, Reply
    from ktcli.chat.desk import Desk
    from ktcli.chat.keeper import Keeper
    from ktcli.chat.screen import Screen
    from ktcli.engine.drafting import DraftWish

GREETING = "Hello!"  # what is said to the model when nobody says anything
PIPE = "-"  # a prompt that is all on standard input

NameArg = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Model to talk to. Default: the setting model, else kt-mini."
    ),
]
PromptArg = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Answer this and exit; - is standard input."),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the most likely token always.")]
MaxTokens = Annotated[
    int | None,
    setting_option("max-tokens", "-n", min=1),
]
System = Annotated[str | None, setting_option("system", "-s")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Text that ends an answer; may be repeated."),
]
Number = float | None
Temperature = Annotated[Number, setting_option("temperature")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", help="Keep the best K tokens.")]
TopP = Annotated[
    Number, typer.Option("--top-p", metavar="P", help="Keep the best tokens up to probability P.")
]
MinP = Annotated[
    Number, typer.Option("--min-p", metavar="P", help="Drop what is P times less likely.")
]
Penalty = Annotated[
    Number,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1: repeat less. 1 is off."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Equal seeds give equal texts. Default: random."),
]
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help=f"{SETTINGS['think'].help} Default: {SETTINGS['think'].default}.",
    ),
]
ThinkBudget = Annotated[int | None, setting_option("think-budget", min=1)]
HideThinking = Annotated[
    bool,
    typer.Option("--hide-thinking", help="Show no thoughts, not even that there were some."),
]
DraftOpt = Annotated[
    str | None,
    setting_option("draft"),
]
NoKvCache = Annotated[
    bool,
    typer.Option(
        "--no-kv-cache", help="Read and write no KV pages on disk. See kt cache and KT_CACHE."
    ),
]
GoOn = Annotated[bool, typer.Option("--continue", help="Go on with the last conversation.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[CHAT]",
        help="Go on with a kept conversation (kt chats lists them). Without a name: choose one.",
    ),
]
ExplainCache = Annotated[
    bool,
    typer.Option(
        "--explain-cache",
        help="Where cached tokens could not be used, say at which token and why.",
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option("--jsonl", help="Print the answer as lines of JSON while it is made."),
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write the answer's text into a new file, too."),
]
Stats = Annotated[bool, typer.Option("--stats", help="Show token counts and rates (on stderr).")]


def chat(
    name: NameArg = None,
    prompt: PromptArg = None,
    greedy: Greedy = False,
    max_tokens: MaxTokens = None,
    system: System = None,
    stop: Stop = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    think: Think = None,
    think_budget: ThinkBudget = None,
    hide_thinking: HideThinking = False,
    go_on: GoOn = False,
    resume: Resume = None,
    allow_special: AllowSpecialOpt = False,
    context: ContextOpt = None,
    threads: ThreadsOpt = None,
    numa: NumaOpt = None,
    device: DeviceOpt = AUTO,
    gpu_experts: GpuExpertsOpt = None,
    defer: DeferOpt = None,
    prefill_threshold: PrefillThresholdOpt = None,
    draft: DraftOpt = None,
    no_kv_cache: NoKvCache = False,
    stats: Stats = False,
    explain_cache: ExplainCache = False,
    json: JsonOpt = False,
    jsonl: JsonLines = False,
    output: OutputFile = None,
    quiet: QuietOpt = False,
) -> None:
    """Talk to a model.

    The model is pulled and converted first if it is not yet. With a PROMPT, text on standard input, or both, one answer
    is printed; @FILE in a PROMPT puts that file below it. Sampling defaults are the model's own. In a chat, /help lists
    the commands.

    A chat on the terminal is kept as it goes on; --continue and --resume go on with it, with its model and settings
    unless others are asked for.

    Examples:

      kt chat

      kt chat "what does kt convert do?"

      kt chat qwen3-30b-a3b

      git diff | kt chat qwen3-30b-a3b "Review this change by @CONTRIBUTING.md"

      kt chat --continue
    """
    from ktcli.assembly.kvpages import cache_quota, stored_pages
    from ktcli.assembly.request import DeviceWords, Wanted

    given = {
        "greedy": True if greedy else None,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    if greedy and temperature:
        raise UsageError(
            f"--greedy and --temperature {temperature:g} contradict each other",
            hint="leave one of them out",
        )
    if json and jsonl:
        raise UsageError(
            "--json and --jsonl contradict each other",
            hint="--jsonl gives the answer as it comes, --json once it is whole",
        )
    asked = AnswerRequest(
        given, max_tokens, tuple(stop or ()), system, think, stats,
        allow_special=allow_special, explain_cache=explain_cache,
        kept=kept_chat(go_on, resume), draft=_draft_wish(draft), think_budget=think_budget,
        hides_thoughts=hide_thinking, streams_json=jsonl,
        output=None if output is None else answer_file.checked(output),
    )  # fmt: skip
    recording = config.records_heat()
    quota = 0 if no_kv_cache else cache_quota()
    model, prompt = who_and_what(name, prompt, asked.model)
    if model == asked.model:
        asked.require_model()
    needs_prompt = "--output" if output else "--jsonl" if jsonl else "--json" if json else ""
    words = _words(prompt, needs_prompt, named=name is not None)
    where = DeviceWords(device, gpu_experts, defer, prefill_threshold)
    with asked.telling_whose_model(model):
        ready, made = _open(
            model, asked, Wanted(context, threads, numa=asked_numa(numa), device=where)
        )
    try:
        with stored_pages(made.speaker.engine, ready.pack, quota, out) as store:
            if words is None:
                _converse(made, asked)
            else:
                _answer_once(made, words, asked)
            if store is not None:
                made.sequence.keep()  # the end of the last answer
    finally:
        if recording:
            _record(ready, made)


def _draft_wish(option: str | None) -> DraftWish:
    from ktcli.engine.drafting import DraftWish

    if option is not None:
        return DraftWish.parse(option, "--draft")
    said = config.stated("draft")
    return DraftWish.parse(said.text or None, said.source)


def who_and_what(
    name: str | None, prompt: str | None, default: str = BUILTIN
) -> tuple[str, str | None]:
    """The model and the prompt of a command line; a prompt of None: ask for it.

    One argument is a model if it can be one, else a prompt for the default model if it contains white
    space.

    Raises:
        UsageError, NotFound: it is neither; the hint has the nearest names.
    """
    if name is None or prompt is not None:
        return default if name is None else name, prompt
    if not name.strip():
        return default, None
    if name == PIPE:
        return default, PIPE
    try:
        reference = parse(name)
        if not reference.repository:  # of formats that are not there yet the conversion is made
            library.matching(reference.name or name) or library.resolve(name)
        return name, None
    except (UsageError, NotFound) as error:
        if any(letter.isspace() for letter in name):
            return default, name
        say = f'to say it to the built-in model: kt chat {BUILTIN} "{name[:40]}"'
        error.hint = f"{error.hint}; {say}" if error.hint else say
        raise


def _words(prompt: str | None, option: str, *, named: bool) -> str | None:
    """The text for the model: the prompt, and below it the text on standard input; None: ask a person.

    Args:
        option: one that needs a prompt; empty: none.
        named: whether the model was named; then an empty pipe is no greeting.
    Raises:
        UsageError: there is nothing to say, or a file that the prompt names cannot be read.
    """
    from ktcli.chat import attachments

    if prompt is None:
        if not _is_terminal():
            words = standard_input()
            if not words and named and is_piped():
                raise UsageError("standard input is empty", hint="nothing came through the pipe")
            return words or GREETING
        if option:
            raise UsageError(
                f"{option} needs a prompt", hint=f'for example: kt chat "Hello!" {option}'
            )
        return None
    if prompt == PIPE:
        words, empty = standard_input(), "standard input is empty"
    else:
        prompt = attachments.joined(*attachments.named_in(prompt))
        piped = "" if is_typed() else standard_input(beside=True)
        words, empty = (
            "\n\n".join(part for part in (prompt, piped) if part.strip()),
            "the prompt is empty",
        )
    if not words:
        raise UsageError(empty, hint=f'for example: kt chat {BUILTIN} "Hello!"')
    return words


def _open(model: str, asked: AnswerRequest, wanted: Wanted) -> tuple[Ready, Chat]:
    from ktcli.assembly.load import load
    from ktcli.assembly.prepare import prepare
    from ktcli.chat.chat import Chat
    from ktcli.chat.speaker import Speaker, read_voice

    ready = prepare(model, wanted, read_voice, listener=out)
    voice = read_voice(ready.name, ready.pack, allow_special=asked.allow_special)
    if asked.thinking is not None and not voice.may_think:
        flag = "--think" if asked.thinking else "--no-think"
        out.warn(
            f"{flag}: the chat template of {ready.name} knows no such choice; it changes nothing"
        )
    if asked.think_budget is not None and not voice.thinks:
        out.warn(
            f"--think-budget: {ready.name} does not think before it answers; it changes nothing"
        )
    engine = load(ready, wanted, out)
    speaker = Speaker(ready.name, engine, voice, lasting_name(model), library.identity(ready.pack))
    made = Chat(speaker, asked.over(preferred_settings(voice.settings)), asked.draft)
    system = config.value("system") if asked.system is None else asked.system
    made.conversation.system = system or ""
    sampling = made.settings.sampling
    if asked.sampling["seed"] is not None and sampling.is_greedy:
        out.warn(f"--seed {sampling.seed} changes nothing: the most likely token is always taken")
    return ready, made


def lasting_name(model: str) -> str:
    """The name that finds a model again from any folder."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "~", "/")) or model.endswith(".gguf")
    return str(path.absolute()) if is_path and path.exists() else model


def _taken_over(keeper: Keeper, made: Chat, asked: AnswerRequest) -> None:
    """Goes on with the kept conversation that was asked for, with the options of this command line."""
    assert asked.kept is not None
    keeper.take_over(asked.kept.path)
    _put_over(made, asked)


def _put_over(made: Chat, asked: AnswerRequest) -> None:
    made.settings = asked.over(made.settings)
    if asked.system is not None:
        made.conversation.system = asked.system


def _record(ready: Ready, made: Chat) -> None:
    """Adds the experts that this chat chose to the model's heat map.

    A GPU that failed cannot be asked any more; then only the failure is reported.
    """
    from ktcli.store import heat

    engine = made.speaker.engine
    with contextlib.suppress(DeviceError):
        fresh = heat.Heat.of(engine.chosen(), engine.spec.top_k)
        heat.add(ready.pack, fresh, out.warn)


def _answer_once(made: Chat, words: str, asked: AnswerRequest) -> None:
    from ktcli.chat.interrupt import Interrupt
    from ktcli.chat.keeper import Keeper
    from ktcli.chat.speaker import longer_context
    from ktcli.chat.thoughts import without_marks
    from ktcli.commands.answer_events import AnswerEvents

    screen = AnswerEvents(sys.stdout) if asked.streams_json else _screen(asked)
    with contextlib.ExitStack() as keeping, Interrupt() as interrupt:
        if asked.kept is not None:
            keeper = Keeper(made, out.warn)
            _taken_over(keeper, made, asked)
            keeping.callback(keeper.close)
            keeping.enter_context(keeper.on_signals())
        screen.begin(lambda: made.answering.stats.tokens if made.answering else 0)
        said: dict[bool, str] = {True: "", False: ""}  # thoughts, and the answer
        try:
            for piece in made.ask(words, cancelled=interrupt, progress=screen.reading):
                said[piece.thought] += piece.text
                if out.mode is not Mode.JSON:
                    screen.piece(piece)
        except ContextFull as error:
            error.hint = f"ask about a part of it; {longer_context(made.speaker.engine)}"
            raise
        finally:
            if out.mode is not Mode.JSON:
                screen.end()
    reply = made.reply
    assert reply is not None
    if asked.output is not None:
        answer_file.write(asked.output, said[False])
    if interrupt.asked:
        raise KeyboardInterrupt
    if out.mode is Mode.JSON or asked.streams_json:
        answer, thinking = said[False], without_marks(said[True])
        shown = document(made, reply, answer.lstrip("\n") if said[True] else answer, thinking)
        if asked.explain_cache:
            shown["cache_loss"] = None if made.loss is None else asdict(made.loss)
        if isinstance(screen, AnswerEvents):
            screen.answer(shown)
        else:
            out.result(shown, "")
    _remark(made, reply, asked)


def _remark(made: Chat, reply: Reply, asked: AnswerRequest) -> None:
    """Says on stderr how an answer ended and, if asked, what it took."""
    from ktcli.chat.compaction import exchanges
    from ktcli.chat.speaker import longer_context
    from ktcli.chat.statistics import cached_line, six_lines
    from ktcli.engine.request import Finish

    if reply.finish is Finish.CONTEXT:
        hint = f"the answer ends where it does; {longer_context(made.speaker.engine)}"
        out.warn(f"the context of {made.speaker.engine.context:,} tokens is full", hint=hint)
    if reply.dropped:
        out.warn(
            f"the context was full: {exchanges(reply.dropped)} went unread",
            hint="kt config set when-full stop refuses such a question instead",
        )
    if reply.finish is Finish.LENGTH:
        out.note(f"(cut at {len(reply.ids):,} tokens; --max-tokens changes it)")
    if reply.thought_cut:
        most = made.settings.think_budget or 0
        out.note(f"(the thought was ended at {most:,} tokens; --think-budget changes it)")
    if asked.stats:
        sys.stderr.write(six_lines(reply.stats) + "\n")
        if reply.stats.reused_tokens:
            sys.stderr.write(cached_line(reply.stats) + "\n")
    if asked.explain_cache and made.loss is not None:
        out.note(made.loss.sentence)


def document(made: Chat, reply: Reply, text: str, thinking: str) -> dict[str, Any]:
    """The answer for --json, its text and its thoughts apart."""
    stats = reply.stats
    return {
        "text": text,
        "thinking": thinking,
        "ids": reply.ids,
        "model": made.speaker.name,
        "finish": reply.finish.value,
        "thinking_cut": reply.thought_cut,
        "dropped_turns": reply.dropped,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
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
        },
    }


def _converse(made: Chat, asked: AnswerRequest) -> None:
    from ktcli.chat import slash
    from ktcli.chat.interactive import Remarks, talk
    from ktcli.chat.prompt import Prompt
    from ktcli.chat.slash_files import resume

    def go_on(desk: Desk) -> None:
        assert asked.kept is not None
        resume(desk, asked.kept.path)
        _put_over(made, asked)

    out.note(f"{made.speaker.name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves")
    prompt = Prompt(config.home() / "history", slash.words, out.warn)
    remarks = Remarks(asked.stats, asked.explain_cache)
    talk(made, prompt, _screen(asked), out, remarks=remarks, begin=go_on if asked.kept else None)


def _screen(asked: AnswerRequest) -> Screen:
    from ktcli.chat.screen import Screen
    from ktcli.chat.thoughts import ThoughtsView

    stream = sys.stdout
    colour = bool(out.style("x", "dim", stream) != "x")
    terminal = stream.isatty() and out.mode is not Mode.JSON
    screen = Screen(stream, terminal=terminal, colour=colour)
    screen.markdown = config.value("markdown") is not False
    screen.status = config.value("status") is not False
    view = "hidden" if asked.hides_thoughts else config.value("thoughts")
    screen.view = ThoughtsView(view or ThoughtsView.FOLDED)
    return screen


def _is_terminal() -> bool:
    """Returns whether standard input and output are both a terminal."""
    try:
        return is_typed() and sys.stdout.isatty()
    except ValueError:  # closed
        return False
