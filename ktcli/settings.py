"""The table of kt's settings: one row each, with its possible values, its default and its meaning.

From these rows come the variables (`KT_THREADS` of the row `threads`), the keys of the settings file, the words and
defaults of options in the help, `kt config`, the completions, docs/commands.md and the man page. `config` tells what
a setting is now. A row with an option is overridden by it: file < environment < option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ktcli.errors import UsageError
from ktcli.records import dataclass

SHOWN_CHARS = 60  # of a wrong value in a sentence
_MOST_DIGITS = 19
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT])(?:i?B)?|B)?"
_MOST_PATH = 4096
MOONCAKE = "mooncake://"  # begins the name of a store of KV pages that is no folder


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that a setting can have.

    Attributes:
        allowed: what a value can be, for people: "a whole number from 1 to 4096".
        wrong: what a wrong value is, after "which is": "not a whole number from 1 to 4096".
        read: gives the value that a text means; raises ValueError if it means none.
        bare: whether TOML has it without quotes.
    """

    allowed: str
    wrong: str
    read: Callable[[str], Any]
    bare: bool = False


def whole_numbers(least: int, most: int) -> Domain:
    """Returns the domain of a setting (the values that it can have) that is a whole number from `least` to `most`."""

    def read(text: str) -> int:
        # int() itself also takes other digits, and refuses thousands of them with an error of its own.
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise ValueError(text)
        if not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    allowed = f"a whole number from {least} to {most}"
    return Domain(allowed, f"not {allowed}", read, bare=True)


def real_numbers(least: float, most: float) -> Domain:
    """Returns the domain of a setting (the values that it can have) that is a number from `least` to `most`."""

    def read(text: str) -> float:
        value = float(text)
        if not least <= value <= most:  # also false for NaN
            raise ValueError(text)
        return value

    allowed = f"a number from {least:g} to {most:g}"
    return Domain(allowed, f"not {allowed}", read, bare=True)


def words_like(pattern: str, allowed: str) -> Domain:
    """Returns the domain of a setting (the values that it can have) that is a word matching a regular expression;
    `allowed` describes it to people. What uses the setting checks the rest.
    """

    def read(text: str) -> str:
        if re.fullmatch(pattern, text, re.ASCII) is None:
            raise ValueError(text)
        return text

    return Domain(allowed, f"not {allowed}", read)


def texts(most_chars: int) -> Domain:
    """Returns the domain of a setting (the values that it can have) that is a text of at most `most_chars` characters,
    not empty.
    """

    def read(text: str) -> str:
        if len(text) > most_chars or "\0" in text or not text.strip():
            raise ValueError(text)
        return text

    return Domain("a text", f"longer than {most_chars:,} characters, or empty", read)


def _read_switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(text)
    return text == "on"


def _read_size(text: str) -> int:
    found = re.fullmatch(_SIZE, text, re.ASCII | re.IGNORECASE)
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def _read_folder(text: str) -> str:
    """A folder must not depend on where a command is run."""
    if not text.startswith(("/", "~")) or "\0" in text or len(text) > _MOST_PATH:
        raise ValueError(text)
    return text


def _read_store(text: str) -> str:
    """A store of Mooncake is known by its name, whose rest is checked by whoever opens stores."""
    return text if text == "off" or text.startswith(MOONCAKE) else _read_folder(text)


def _read_folders(text: str) -> list[str]:
    return [] if text == "off" else [_read_folder(each) for each in text.split(":")]


ON_OFF = Domain("on or off", "neither on nor off", _read_switch)
SIZES = Domain("a size, such as 20G, 500M or 0", "not a size", _read_size)
_PATHS = "an absolute path, or one that begins with ~"
FOLDERS = Domain(_PATHS, f"not {_PATHS}", _read_folder)
_SEVERAL = "absolute paths separated by colons, or off"
FOLDER_LISTS = Domain(_SEVERAL, f"not {_SEVERAL}", _read_folders)
_STORES = "an absolute path, one that begins with ~, mooncake://HOST:PORT, or off"
STORES = Domain(_STORES, f"not {_STORES}", _read_store)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of kt: its name, its domain, and its texts for people.

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
        """The name of the environment variable for the setting: KT_MAX_TOKENS for max-tokens."""
        return f"KT_{self.name.upper().replace('-', '_')}"

    @property
    def summary(self) -> str:
        """The first sentence of the setting's help, without the full stop."""
        return self.help.split(". ")[0].rstrip(".")

    def read_option(self, text: str) -> Any:
        """Returns the parsed value of the setting from the text of its command-line option.

        Raises:
            UsageError: `text` is not a value of this setting.
        """
        return self.read(text, self.option, "leave it out")

    def read(self, text: str, source: str, undo: str) -> Any:
        """Returns the parsed value of the setting from a text.

        Args:
            source: where the text is from, for the error's sentence: "KT_THREADS".
            undo: the command that removes it, for the hint.
        Raises:
            UsageError: `text` is not a value of this setting.
        """
        try:
            return self.domain.read(text)
        except ValueError:
            raise UsageError(
                f"{source} is {text[:SHOWN_CHARS]!r}, which is {self.domain.wrong}",
                hint=f"it can be {self.domain.allowed}; {undo} for the default: {self.default}",
            ) from None


# In the order in which `kt config list` shows them.
TABLE: tuple[Setting, ...] = (
    Setting(
        "home", FOLDERS, "DIR", "~/.local/share/kt",
        "Library folder, where models and chats are stored.",
    ),
    Setting(
        "libraries", FOLDER_LISTS, "DIR", "/usr/local/share/kt, if it exists",
        "Further, read-only library folders. They are searched in this order, after your own (home).",
    ),
    Setting(
        "model", texts(1000), "MODEL", "kt-mini",
        "Model that kt chat uses when no model is given.",
    ),
    Setting(
        "system", texts(20_000), "TEXT", "none", "System text.", option="--system",
    ),
    Setting(
        "temperature", real_numbers(0, 100), "X", "the model's own",
        "Randomness of answers; 0 is greedy.", option="--temperature",
    ),
    Setting(
        "top-k", whole_numbers(0, 10_000_000), "K", "the model's own",
        "Sample from the K most likely tokens only.", option="--top-k",
    ),
    Setting(
        "top-p", real_numbers(0, 1), "P", "the model's own",
        "Sample from the most likely tokens up to total probability P.",
        option="--top-p",
    ),
    Setting(
        "min-p", real_numbers(0, 1), "P", "the model's own",
        "Leave out tokens less likely than P times the most likely one.", option="--min-p",
    ),
    Setting(
        "seed", whole_numbers(0, (1 << 63) - 1), "N", "random",
        "Seed of the sampling; the same seed gives the same text.", option="--seed",
    ),
    Setting(
        "stop", texts(1000), "TEXT", "none", "Text that stops the answer; the option may be repeated.", option="--stop",
    ),
    Setting(
        "max-tokens", whole_numbers(1, 10_000_000), "N", "the model's own, else up to the end of the context",
        "Longest answer, in tokens.", option="--max-tokens",
    ),
    Setting(
        "think", ON_OFF, "on|off", "the model's default",
        "Whether the model thinks before answering, if this is optional.", option="--think",
    ),
    Setting(
        "think-budget", whole_numbers(1, 10_000_000), "N", "no limit",
        "Maximum number of thinking tokens per answer; after that, the model must answer.", option="--think-budget",
    ),
    Setting(
        "thoughts", words_like("folded|shown|hidden", "folded, shown or hidden"), "folded|shown|hidden", "folded",
        "How a model's thoughts are shown on a terminal.",
    ),
    Setting(
        "markdown", ON_OFF, "on|off", "on", "Whether answers on a terminal are rendered as Markdown.",
    ),
    Setting(
        "status", ON_OFF, "on|off", "on", "Whether a chat shows a status line below each answer.",
    ),
    Setting(
        "when-full", words_like("drop|stop", "drop or stop"), "drop|stop", "drop",
        "What happens when a question no longer fits. drop: kt leaves out the oldest turns; stop: it refuses the"
        " question.",
    ),
    Setting(
        "attach", words_like("loaded|always|never", "loaded, always or never"), "loaded|always|never", "loaded",
        "Whether a chat uses a running server of this library. loaded: only if the server has the model loaded; always:"
        " the server loads the model if necessary; never: the model is loaded here.",
        option="--attach",
    ),
    Setting(
        "server", words_like("off|https?://.{1,1000}", "a URL, or off"), "URL|off", "off",
        "Chat with a model of the server at this address, which speaks OpenAI's API: kt serve, a router, vLLM, SGLang,"
        " llama-server. off: no server.",
        option="--server",
    ),
    Setting(
        "server-key-file", FOLDERS, "FILE", "none",
        "File with the API key of that server; only its owner may read it.", option="--server-key-file",
    ),
    Setting(
        "context", whole_numbers(1, 10_000_000), "N", "what fits, up to 8192; with kt serve up to 65536",
        "Context length in tokens.", option="--context",
    ),
    Setting(
        "kv", words_like("bf16|fp8", "bf16 or fp8"), "bf16|fp8", "bf16",
        "Number format of the KV cache. fp8 needs half the memory; models with sparse attention support only bf16.",
        option="--kv",
    ),
    Setting(
        "draft", words_like("off|lookup|[1-9][0-9]?", "off, lookup or a number of tokens"), "off|lookup|N",
        "lookup, without a GPU",
        "Draft up to N tokens from repeated text and check them in one step. lookup: as many as pay off; answers stay"
        " the same.",
        option="--draft",
    ),
    Setting(
        "device", words_like("auto|cpu|cuda(:[0-9]{1,4})?", "auto, cpu, cuda or cuda:N"), "auto|cpu|cuda|cuda:N",
        "a GPU if that is faster", "Where attention and dense parts run.", option="--device",
    ),
    Setting(
        "gpus", words_like("all|[0-9]{1,4}(,[0-9]{1,4}){0,63}", "all, or numbers separated by commas"), "all|LIST",
        "all that make it faster", "GPUs that may be used, by number, such as 0,1. They take the layers in this order.",
        option="--gpus",
    ),
    Setting(
        "placement", FOLDERS, "FILE", "none",
        "File with rules that say where parts of the model go; what no rule names is the plan's.",
        option="--placement",
    ),
    Setting(
        "defer", whole_numbers(0, 64), "N", "as few as keep the CPU busy",
        "Let N experts per token finish one layer later: faster, slightly different answers. 0 turns this off.",
        option="--defer",
    ),
    Setting(
        "threads", whole_numbers(1, 4096), "N", "one per performance core",
        "CPU threads.", option="--threads",
    ),
    Setting(
        "numa", words_like(r"auto|off|[0-9]{1,2}|nodes=[0-9,-]{1,200}", "auto, off, a number of teams, or nodes=LIST"),
        "auto|off|N|nodes=LIST", "one per NUMA node",
        "Split threads and weights across NUMA nodes.", option="--numa",
    ),
    Setting(
        "host", words_like(r"[0-9A-Za-z.:_-]{1,255}", "an address of this machine"), "ADDRESS", "127.0.0.1",
        "Address to listen on; one that other machines can reach needs an API key.", option="--host",
    ),
    Setting(
        "port", whole_numbers(1, 65535), "PORT", "11435", "Port to listen on.", option="--port",
    ),
    Setting(
        "api-key-file", FOLDERS, "FILE", "none",
        "File with the API key that clients must send, or several as lines name:key; only its owner may read it.",
        option="--api-key-file",
    ),
    Setting(
        "parallel", whole_numbers(1, 64), "N", "4",
        "Conversations to answer at the same time, each with the full context.", option="--parallel",
    ),
    Setting(
        "max-pause", real_numbers(0.01, 60), "SECONDS", "as short as costs at most 5% of the speed",
        "Longest pause of running answers while a new prompt is read; a shorter one makes prompts take longer.",
        option="--max-pause",
    ),
    Setting(
        "keep-alive",
        words_like(r"[-+]?[0-9][0-9a-z.µ]{0,40}", "a duration, such as 5m, 1h30m, 300 (seconds), 0 or -1"),
        "TIME", "forever for NAME, 5m for other models",
        "How long an unused model stays in memory: 5m, 1h30m, 300 (seconds), 0, or -1 forever.",
        option="--keep-alive",
    ),
    Setting(
        "heat", ON_OFF, "on|off", "on", "Whether chats record which experts are used.",
    ),
    Setting(
        "cache", SIZES, "SIZE", "a tenth of the free disk space",
        "Maximum disk space for KV pages; 0 turns them off.",
    ),
    Setting(
        "kv-store", STORES, "STORE|off", "off",
        "Where several servers share KV pages: a folder, such as one on NFS, or mooncake://HOST:PORT. What one has"
        " computed, the others read.",
        option="--kv-store",
    ),
    Setting(
        "kv-store-size", SIZES, "SIZE", "a tenth of the disk space that is free there",
        "Maximum size of the KV pages that this library writes to the shared folder.", option="--kv-store-size",
    ),
    Setting(
        "kv-insecure", ON_OFF, "on|off", "off",
        "Whether a Mooncake store may be on an address that is not of a private network; it has no authentication.",
    ),
    Setting(
        "kv-events",
        words_like(
            r"off|tcp://(\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253}|\*):[0-9]{1,5}",
            "an address, such as tcp://127.0.0.1:5557, or off",
        ),
        "ADDRESS|off", "off",
        "Address for events that tell routers which KV pages the server has, such as tcp://127.0.0.1:5557. They contain"
        " token ids. The next port is used, too: there routers ask for events that they missed.",
        option="--kv-events",
    ),
    Setting(
        "pull-limit", SIZES, "SIZE", "no limit", "Maximum download rate, in bytes per second; 0 means no limit.",
        option="--limit",
    ),
    Setting(
        "isa", texts(100), "ROW", "the best this CPU can run",
        "Row of kernels to use, as kt doctor -v lists them.", kept=False,
    ),
    Setting(
        "tile-min", whole_numbers(1, 4096), "N", "measured on this machine",
        "Number of tokens per expert from which AMX tiles are used.", kept=False,
    ),
    Setting(
        "debug", texts(100), "1", "off", "Show the traceback of an error.", kept=False,
    ),
)  # fmt: skip

SETTINGS = {setting.name: setting for setting in TABLE}

# What else kt heeds of the environment, and what it means.
OTHER_VARIABLES = {
    "KT_CONFIG": "The settings file. Default: $XDG_CONFIG_HOME/kt/config.toml, else ~/.config/kt/config.toml.",
    "HF_ENDPOINT": "Address of a mirror of Hugging Face.",
    "HF_TOKEN": "Token for private and gated repositories on Hugging Face.",
    "SSL_CERT_FILE, REQUESTS_CA_BUNDLE": "Certificates (PEM) of the authorities that sign those of https"
    " servers, for kt chat --server, kt route and kt bench serve. Default: the system's.",
    "CUDA_VISIBLE_DEVICES": "GPUs that may be used.",
    "NO_COLOR": "Turns off colours if it is set.",
    "VISUAL, EDITOR": "Editor for kt config edit, and for Ctrl-X Ctrl-E in a chat.",
}
