"""Declares the options of `kt chat`, as groups of those that are read together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ktcli.commands.cli.declarations import argument, checked, exclusive, option, setting_option
from ktcli.records import dataclass
from ktcli.settings import SETTINGS

LOADED, ALWAYS, NEVER = "loaded", "always", "never"  # the setting attach

NameArg = Annotated[
    str | None, argument("NAME", "Model to talk to. Default: the model setting, else kt-mini.")
]
PromptArg = Annotated[
    str | None, argument("PROMPT", "Question to answer once; - reads standard input.")
]


System = Annotated[str | None, setting_option("system", "-s")]
Temperature = Annotated[float | None, setting_option("temperature")]
TopK = Annotated[int | None, setting_option("top-k")]
TopP = Annotated[float | None, setting_option("top-p")]
MinP = Annotated[float | None, setting_option("min-p")]
Penalty = Annotated[
    float | None,
    option("--repetition-penalty X", "Values above 1 discourage repetition; 1 is off."),
]
Seed = Annotated[int | None, setting_option("seed")]
Stop = Annotated[list[str] | None, setting_option("stop")]
MaxTokens = Annotated[int | None, setting_option("max-tokens", "-n", min=1)]
Think = Annotated[
    bool | None,
    option("--think/--no-think", f"{SETTINGS['think'].help} Default: {SETTINGS['think'].default}."),
]
ThinkBudget = Annotated[int | None, setting_option("think-budget", min=1)]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How answers are made: the sampling, their length, what stands before them, the thoughts."""

    greedy: Annotated[bool, option("--greedy", "Always choose the most likely token.")] = False
    max_tokens: MaxTokens = None
    system: System = None
    stop: Stop = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: Penalty = None
    seed: Seed = None
    think: Think = None
    think_budget: ThinkBudget = None
    hide_thinking: Annotated[
        bool, option("--hide-thinking", "Hide the model's thoughts entirely.")
    ] = False

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options as arguments of `Settings.sampled`: a dict from "temperature", "seed" and so on to the
        value that the command line gives; None for options that were not given.

        Raises:
            UsageError: --greedy and --temperature contradict each other.
        """
        if self.greedy and self.temperature:
            raise exclusive("--greedy", f"--temperature {self.temperature:g}")
        names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"
        return {"greedy": self.greedy or None, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Which saved conversation is continued."""

    go_on: Annotated[bool, option("--continue", "Continue the last conversation.")] = False
    resume: Annotated[
        str | None,
        option(
            "--resume [CHAT]",
            "Continue a saved conversation (kt chats lists them). Without a name: choose one.",
        ),
    ] = None


DraftOpt = Annotated[str | None, setting_option("draft")]
NoKvCacheOpt = Annotated[
    bool,
    option(
        "--no-kv-cache",
        "Do not read or write KV pages on disk or in a shared folder. See kt cache and KT_CACHE.",
    ),
]


_attach = checked(SETTINGS["attach"].read_option, else_setting=True)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which process has the model: this one, a server of this library, or another one."""

    attach: Annotated[str, setting_option("attach", callback=_attach)] = LOADED
    no_attach: Annotated[
        bool, option("--no-attach", "Load the model here: the same as --attach never.")
    ] = False
    server: Annotated[str | None, setting_option("server")] = None
    server_key_file: Annotated[Path | None, setting_option("server-key-file")] = None


StatsOpt = Annotated[bool, option("--stats", "Show token counts and rates (on stderr).")]
ExplainCacheOpt = Annotated[
    bool,
    option(
        "--explain-cache", "If cached tokens could not be used, say from which token on and why."
    ),
]


@dataclass(frozen=True, slots=True)
class FormOptions:
    """How answers are written, and what form they have."""

    jsonl: Annotated[
        bool, option("--jsonl", "Print the answer as lines of JSON while it is written.")
    ] = False
    output: Annotated[
        Path | None, option("--output FILE", "Also write the answer's text to a new file.")
    ] = None
    schema: Annotated[
        Path | None, option("--schema FILE", "Constrain answers to the JSON schema in FILE.")
    ] = None
    format: Annotated[
        str | None, option("--format json", "Constrain answers to a JSON object.")
    ] = None

    def needing_prompt(self, *, json: bool) -> str:
        """Returns the name of the first option given that needs a prompt: "--output", "--jsonl" or "--json"; empty:
        none is given.

        Raises:
            UsageError: --json and --jsonl are both given.
        """
        if json and self.jsonl:
            hint = "--jsonl prints the answer as it is written, --json once it is complete"
            raise exclusive("--json", "--jsonl", hint)
        asked = {"--output": self.output, "--jsonl": self.jsonl, "--json": json}
        return next((option for option, given in asked.items() if given), "")
