"""The settings of kt are one table: a row each, with what it can be, what it is by default, and what it means.

From these rows come the variables (`KT_THREADS` of the row `threads`), the keys of the settings file, the words and
defaults of options in the help, `kt config`, the completions, docs/commands.md and the man page. `config` tells what
a setting is now. A row with an option is overridden by it: file < environment < option.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

from ktcli.errors import UsageError

SHOWN_CHARS = 60  # of a wrong value in a sentence
_MOST_DIGITS = 19
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT])(?:i?B)?|B)?", re.ASCII | re.IGNORECASE
)


class Domain(Protocol):
    """The values that a setting can have."""

    @property
    def allowed(self) -> str:
        """What a value can be, for people: "a whole number from 1 to 4096"."""

    @property
    def wrong(self) -> str:
        """What a wrong value is, after "which is": "not a whole number from 1 to 4096"."""

    def read(self, text: str) -> Any:
        """The value that a text means.

        Raises:
            ValueError: it means none.
        """


@dataclass(frozen=True, slots=True)
class WholeNumbers:
    """Whole numbers of a range."""

    least: int
    most: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    @property
    def wrong(self) -> str:
        return f"not {self.allowed}"

    def read(self, text: str) -> int:
        # int() itself also takes other digits, and refuses thousands of them with an error of its own.
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise ValueError(text)
        if not self.least <= int(text) <= self.most:
            raise ValueError(text)
        return int(text)


@dataclass(frozen=True, slots=True)
class RealNumbers:
    """Numbers of a range."""

    least: float
    most: float

    @property
    def allowed(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    @property
    def wrong(self) -> str:
        return f"not {self.allowed}"

    def read(self, text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and self.least <= value <= self.most):
            raise ValueError(text)
        return value


class OnOff:
    """On and off."""

    @property
    def allowed(self) -> str:
        return "on or off"

    @property
    def wrong(self) -> str:
        return "neither on nor off"

    def read(self, text: str) -> bool:
        return {"on": True, "off": False}[text] if text in ("on", "off") else _no(text)


@dataclass(frozen=True, slots=True)
class WordPattern:
    """Words of a regular expression; whoever uses them knows more about them."""

    pattern: str
    allowed: str

    @property
    def wrong(self) -> str:
        return f"not {self.allowed}"

    def read(self, text: str) -> str:
        return text if re.fullmatch(self.pattern, text, re.ASCII) else str(_no(text))


class ByteSize:
    """Sizes of files and memory, in bytes."""

    @property
    def allowed(self) -> str:
        return "a size, such as 20G, 500M or 0"

    @property
    def wrong(self) -> str:
        return "no size"

    def read(self, text: str) -> int:
        found = _SIZE.fullmatch(text)
        if found is None:
            raise ValueError(text)
        return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text of some length; a folder must not depend on where a command is run."""

    most_chars: int
    folder: bool = False

    @property
    def allowed(self) -> str:
        return "an absolute path, or one that begins with ~" if self.folder else "a text"

    @property
    def wrong(self) -> str:
        return (
            f"not {self.allowed}" if self.folder else f"longer than {self.most_chars:,} characters"
        )

    def read(self, text: str) -> str:
        if len(text) > self.most_chars or "\0" in text or not text.strip():
            raise ValueError(text)
        if self.folder and not text.startswith(("/", "~")):
            raise ValueError(text)
        return text


def _no(text: str) -> Any:
    raise ValueError(text)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        name: its key in the settings file and the name of its option.
        domain: what it can be.
        metavar: the word for its value in the help; completions are made of it.
        default: what it is where nobody says anything, for people.
        help: what it means; the first sentence stands alone in lists.
        option: the option of the command line that overrides it; empty: there is none.
        kept: whether the settings file can have it; a variable for trials is only one of the environment.
    """

    name: str
    domain: Domain
    metavar: str
    default: str
    help: str
    option: str = ""
    kept: bool = True

    @property
    def variable(self) -> str:
        """Its variable in the environment: KT_MAX_TOKENS of max-tokens."""
        return f"KT_{self.name.upper().replace('-', '_')}"

    @property
    def summary(self) -> str:
        """The first sentence of its help, without the full stop."""
        return self.help.split(". ")[0].rstrip(".")

    def read(self, text: str, source: str, undo: str) -> Any:
        """The value of a text.

        Args:
            source: where it was said, for the sentence: "KT_THREADS".
            undo: the command that takes it back.
        Raises:
            UsageError: it can have no such value.
        """
        try:
            return self.domain.read(text)
        except ValueError:
            raise UsageError(
                f"{source} is {text[:SHOWN_CHARS]!r}, which is {self.domain.wrong}",
                hint=f"it can be {self.domain.allowed}; {undo} for the default: {self.default}",
            ) from None


_ON_OFF = OnOff()

# In the order in which `kt config list` shows them.
TABLE: tuple[Setting, ...] = (
    Setting(
        "home", FreeText(4096, folder=True), "DIR", "~/.local/share/kt",
        "Library folder, where models and chats lie.",
    ),
    Setting(
        "model", FreeText(1000), "MODEL", "kt-mini",
        "Model that kt chat talks to when none is named.",
    ),
    Setting(
        "system", FreeText(20_000), "TEXT", "none", "System text.", option="--system",
    ),
    Setting(
        "temperature", RealNumbers(0, 100), "X", "the model's own",
        "Randomness of answers; 0 is greedy.", option="--temperature",
    ),
    Setting(
        "max-tokens", WholeNumbers(1, 10_000_000), "N", "the model's own, else what the context holds",
        "Longest answer, in tokens.", option="--max-tokens",
    ),
    Setting(
        "think", _ON_OFF, "on|off", "as the model likes", "For models that can do both.",
        option="--think",
    ),
    Setting(
        "thoughts", WordPattern("folded|shown|hidden", "folded, shown or hidden"), "folded|shown|hidden", "folded",
        "How a model's thoughts are shown on a terminal.",
    ),
    Setting(
        "markdown", _ON_OFF, "on|off", "on", "Whether answers on a terminal are drawn as Markdown.",
    ),
    Setting(
        "status", _ON_OFF, "on|off", "on", "Whether a chat shows a line about each answer below it.",
    ),
    Setting(
        "context", WholeNumbers(1, 10_000_000), "N", "8192, or what the model and the memory allow",
        "Positions to reserve.", option="--context",
    ),
    Setting(
        "draft", WordPattern("off|lookup|[1-9][0-9]?", "off, lookup or a number of tokens"), "off|lookup|N",
        "lookup, without a GPU",
        "Check several tokens in one step, drafted from what the conversation repeats. As many as pay, or N;"
        " answers stay the same.",
        option="--draft",
    ),
    Setting(
        "device", WordPattern("auto|cpu|cuda(:[0-9]{1,4})?", "auto, cpu, cuda or cuda:N"), "auto|cpu|cuda|cuda:N",
        "a GPU if that is faster", "Where attention and dense parts run.", option="--device",
    ),
    Setting(
        "threads", WholeNumbers(1, 4096), "N", "one per physical core, which is the most",
        "CPU threads.", option="--threads",
    ),
    Setting(
        "numa", WordPattern(r"auto|off|[0-9]{1,2}|nodes=[0-9,-]{1,200}", "auto, off, a number of teams, or nodes=LIST"),
        "auto|off|N|nodes=LIST", "one per NUMA node",
        "Teams of threads, each with its share of the weights in memory beside it.", option="--numa",
    ),
    Setting(
        "heat", _ON_OFF, "on|off", "on", "Whether chats record which experts they use.",
    ),
    Setting(
        "cache", ByteSize(), "SIZE", "a tenth of the free disk",
        "Most that KV pages on disk may take; 0 keeps none.",
    ),
    Setting(
        "isa", FreeText(100), "ROW", "the best that this CPU can run",
        "Row of kernels, as kt doctor -v lists them.", kept=False,
    ),
    Setting(
        "tile-min", WholeNumbers(1, 4096), "N", "what this machine measures",
        "Tokens per expert from which AMX tiles are used.", kept=False,
    ),
    Setting(
        "debug", FreeText(100), "1", "off", "Show the traceback of an error.", kept=False,
    ),
)  # fmt: skip

SETTINGS = {setting.name: setting for setting in TABLE}

# What else kt heeds of the environment, and what it means.
OTHER_VARIABLES = {
    "KT_CONFIG": "The settings file. Default: $XDG_CONFIG_HOME/kt/config.toml, else ~/.config/kt/config.toml.",
    "HF_ENDPOINT": "Address of a mirror of Hugging Face.",
    "HF_TOKEN": "Token for private and gated repositories on Hugging Face.",
    "CUDA_VISIBLE_DEVICES": "GPUs that may be used.",
    "NO_COLOR": "If it is set, nothing is coloured.",
    "VISUAL, EDITOR": "Editor of kt config edit, and of Ctrl-X Ctrl-E in a chat.",
}
