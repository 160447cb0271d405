"""Declares the options of `kt chat`, as named types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktcli.commands.cli.options import preferred, setting_option
from ktcli.settings import SETTINGS

NameArg = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Model to talk to. Default: the model setting, else kt-mini."
    ),
]
PromptArg = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Question to answer once; - reads standard input."),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always choose the most likely token.")]
MaxTokens = Annotated[
    int | None,
    setting_option("max-tokens", "-n", min=1),
]
System = Annotated[str | None, setting_option("system", "-s")]
Stop = Annotated[list[str] | None, setting_option("stop")]
Number = float | None
Temperature = Annotated[Number, setting_option("temperature")]
TopK = Annotated[int | None, setting_option("top-k")]
TopP = Annotated[Number, setting_option("top-p")]
MinP = Annotated[Number, setting_option("min-p")]
Penalty = Annotated[
    Number,
    typer.Option(
        "--repetition-penalty", metavar="X", help="Values above 1 discourage repetition; 1 is off."
    ),
]
Seed = Annotated[int | None, setting_option("seed")]
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
    typer.Option("--hide-thinking", help="Hide the model's thoughts entirely."),
]
DraftOpt = Annotated[
    str | None,
    setting_option("draft"),
]
NoKvCache = Annotated[
    bool,
    typer.Option(
        "--no-kv-cache",
        help="Do not read or write KV pages on disk or in a shared folder. See kt cache and KT_CACHE.",
    ),
]


def _attach(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
    value = preferred(context, option, value)
    return str(SETTINGS["attach"].read(value, "--attach", "leave it out"))


AttachOpt = Annotated[str, setting_option("attach", callback=_attach)]
NoAttach = Annotated[
    bool, typer.Option("--no-attach", help="Load the model here: the same as --attach never.")
]
ServerOpt = Annotated[str | None, setting_option("server")]
ServerKeyFile = Annotated[Path | None, setting_option("server-key-file")]
GoOn = Annotated[bool, typer.Option("--continue", help="Continue the last conversation.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[CHAT]",
        help="Continue a saved conversation (kt chats lists them). Without a name: choose one.",
    ),
]
ExplainCache = Annotated[
    bool,
    typer.Option(
        "--explain-cache",
        help="If cached tokens could not be used, say from which token on and why.",
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option("--jsonl", help="Print the answer as lines of JSON while it is written."),
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Also write the answer's text to a new file."),
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", metavar="FILE", help="Constrain answers to the JSON schema in FILE."),
]
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="json", help="Constrain answers to a JSON object."),
]
Stats = Annotated[bool, typer.Option("--stats", help="Show token counts and rates (on stderr).")]
