"""`kt completion SHELL`: a completion script for a shell, made from the commands themselves.

`completions/` holds its output and packages install it from there. Commands, options and the values that
options take are written into the script, so that completing costs nothing; only model names are asked of
`kt names`. What completes a value follows from its metavar, the word that stands for it in the help.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ktcli.commands.table import COMMANDS, load
from ktcli.errors import UsageError
from ktcli.output import out
from ktcli.settings import SETTINGS


@dataclass(frozen=True, slots=True)
class Values:
    """The values that an option or argument can have.

    Attributes:
        words: literal values.
        names: which names: of models "all", "here" (on disk), "mine" (in the library); "chats"; empty: none.
        files: which files: "any", ".gguf" (folders too), "folders"; empty: none.
    """

    words: tuple[str, ...] = ()
    names: str = ""
    files: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """A long option; `values` is None if it takes none."""

    name: str
    help: str
    values: Values | None = None


@dataclass(frozen=True, slots=True)
class Verb:
    """A command line to complete: "pull", or "bench decode".

    Attributes:
        words: the command and its subcommand.
        help: its line in the help.
        argument: the values of its first argument; None: it has none.
        several: whether all arguments are like the first one.
        children: the names of its subcommands.
    """

    words: str
    help: str
    flags: tuple[Flag, ...]
    argument: Values | None
    several: bool
    children: tuple[str, ...]


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print the completion script of a shell.

    Examples:

      kt completion bash > ~/.local/share/bash-completion/completions/kt
      kt completion zsh > ~/.zfunc/_kt
      kt completion fish > ~/.config/fish/completions/kt.fish
    """
    if shell not in _SCRIPTS:
        raise UsageError(
            f"there is no completion for {shell!r}", hint=f"kt knows {', '.join(_SCRIPTS)}"
        )
    out.stream(script(shell))


def script(shell: str) -> str:
    """The script of one shell."""
    return _SCRIPTS[shell](verbs())


def verbs() -> list[Verb]:
    """Every command that the help shows, subcommands after their family."""
    found = []
    for name, row in COMMANDS.items():
        if row.summary:
            found += _verbs(name, row.summary, load(name))
    return found


def _verbs(words: str, summary: str, command: Any) -> list[Verb]:
    children = getattr(command, "commands", {})
    flags: list[Flag] = []
    arguments = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(parameter)
            continue
        text = _line(getattr(parameter, "help", "") or "")
        values = None if getattr(parameter, "is_flag", False) else values_of(parameter.metavar)
        names = (*parameter.opts, *parameter.secondary_opts)
        flags += [Flag(name, text, values) for name in names if name.startswith("--")]
    flags.append(Flag("--help", "Show this message and exit"))
    first = arguments[0] if arguments else None
    here = Verb(
        words,
        _line(summary),
        tuple(flags),
        _argument(words, str(first.metavar or "")) if first else None,
        first is not None and first.nargs != 1,
        tuple(children),
    )
    below = [v for n, c in children.items() for v in _verbs(f"{words} {n}", c.help or "", c)]
    return [here, *below]


def _argument(words: str, metavar: str) -> Values:
    """The values of a command's argument: most commands take a model, some only one that is on disk."""
    if metavar.rstrip(".") not in ("MODEL", "NAME"):
        return values_of(metavar.rstrip("."))
    names = {"rm": "mine", "verify": "here", "convert": "here"}.get(words, "all")
    return Values(names=names, files=".gguf")


def values_of(metavar: str | None) -> Values:
    """The values that a metavar stands for: "auto|cpu|cuda|cuda:N" are three words and something to be typed; one
    in brackets may be left out."""
    found = Values()
    for word in (metavar or "").strip("[]").split("|"):
        if word in _MEANINGS:
            more = _MEANINGS[word]()
        else:
            literal = word and not re.search(r"[,:=]", word) and word not in _TYPED
            more = Values((word,) if literal else ())
        found = Values(
            (*found.words, *more.words), found.names or more.names, found.files or more.files
        )
    return found


def _formats() -> Values:
    from ktcli.weights.formats import FORMATS

    return Values(tuple(FORMATS))


def _machines() -> Values:
    from ktcli.hardware.profile import shipped

    return Values(tuple(sorted(shipped())))


# Words of metavars that stand for others, and those for what only the user knows.
_MEANINGS: dict[str, Callable[[], Values]] = {
    "FORMAT": _formats,
    "MACHINE": _machines,
    "MODEL": lambda: Values(names="all", files=".gguf"),
    "CHAT": lambda: Values(names="chats"),
    "SETTING": lambda: Values(tuple(SETTINGS)),
    "FILE": lambda: Values(files="any"),
    "FILE.json": lambda: Values(files="any"),
    "FILE.npy": lambda: Values(files="any"),
    "DIR": lambda: Values(files="folders"),
}
_TYPED = {"N", "K", "P", "X", "TEXT", "LIST", "ROW", "WORD", "VALUE"}

# Shell words that print the names of each kind; of models a file may be named instead.
NAMES = {
    "all": "kt names 2>/dev/null",
    "here": "kt names --here 2>/dev/null",
    "mine": "kt names --mine 2>/dev/null",
    "chats": "kt names --chats 2>/dev/null",
}


def _line(text: str) -> str:
    """The first sentence of a help text, on one line, safe between single quotes."""
    first = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\.(?: (?=[A-Z])|$)", first)[0]
    return sentence.replace("'", "’").replace("`", "")


def _families(found: list[Verb]) -> str:
    return "|".join(verb.words for verb in found if verb.children)


# --- bash -------------------------------------------------------------------------------------


def _bash(found: list[Verb]) -> str:
    top = " ".join(verb.words for verb in found if " " not in verb.words)
    cases = "\n".join(map(_bash_case, found))
    kinds = "\n".join(f'        {kind}) words+=" $({names})" ;;' for kind, names in NAMES.items())
    return f"""\
# bash completion for kt; made by: kt completion bash
_kt() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}}
    local options='' words='' names='' files=''
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{top} --help --version" -- "$word"))
        return
    fi
    case $verb in
        {_families(found)}) ((COMP_CWORD > 2)) && verb="$verb ${{COMP_WORDS[2]}}" ;;
    esac
    case "$verb" in
{cases}
    esac
    if [[ $word == -* && -n $options ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
        return
    fi
    case $names in
{kinds}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case $files in
        any) COMPREPLY+=($(compgen -f -- "$word")) ;;
        .gguf) COMPREPLY+=($(compgen -d -- "$word") $(compgen -f -X '!*.gguf' -- "$word")) ;;
        folders) COMPREPLY+=($(compgen -d -- "$word")) ;;
    esac
}}
# A colon is part of hf:org/repo.
COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}
complete -o filenames -F _kt kt
"""


def _bash_case(verb: Verb) -> str:
    """The branch of bash that offers what may follow a command, or the option before the cursor."""
    flags = " ".join(flag.name for flag in verb.flags)
    rest = f"options='{flags}' {_bash_values(verb.argument or Values(verb.children))}".rstrip()
    alike: dict[str, list[str]] = {}
    for flag in verb.flags:
        if flag.values is not None:
            alike.setdefault(_bash_values(flag.values), []).append(flag.name)
    if not alike:
        return f"        '{verb.words}') {rest} ;;"
    values = [f"                {'|'.join(names)}) {does} ;;" for does, names in alike.items()]
    head = [f"        '{verb.words}')", "            case $before in"]
    return "\n".join([*head, *values, f"                *) {rest} ;;", "            esac ;;"])


def _bash_values(values: Values) -> str:
    """The assignments of bash that offer these values."""
    found = {"words": " ".join(values.words), "names": values.names, "files": values.files}
    return " ".join(f"{name}='{value}'" for name, value in found.items() if value)


# --- zsh --------------------------------------------------------------------------------------

_ZSH_FILES = {"any": "_files", ".gguf": '_files -g "*.gguf"', "folders": "_files -/"}


def _zsh(found: list[Verb]) -> str:
    top = "\n".join(f"        '{v.words}:{v.help}'" for v in found if " " not in v.words)
    cases = []
    for verb in found:
        specs = [
            f"'{flag.name}[{_zsh_text(flag.help)}]{_zsh_values(flag.values)}'"
            for flag in verb.flags
        ]
        if verb.argument is not None:
            specs.append(f"'{'*' if verb.several else '1'}{_zsh_values(verb.argument)}'")
        elif verb.children:
            specs.append(f"'1{_zsh_values(Values(verb.children))}'")
        joined = " \\\n            ".join(specs)
        cases.append(f"        '{verb.words}') _arguments -s \\\n            {joined} ;;")
    names = "\n".join(
        f'_kt_{kind}() {{\n    compadd -- ${{(f)"$({words})"}}'
        + ("" if kind == "chats" else f"\n    {_ZSH_FILES['.gguf']}")
        + "\n}"
        for kind, words in NAMES.items()
    )
    return f"""\
#compdef kt
# zsh completion for kt; made by: kt completion zsh
{names}
_kt() {{
    local -a commands
    commands=(
{top}
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local verb=$words[2]
    shift words
    ((CURRENT--))
    case $verb in
        {_families(found)})
            if ((CURRENT > 2)); then
                verb="$verb $words[2]"
                shift words
                ((CURRENT--))
            fi ;;
    esac
    case $verb in
{chr(10).join(cases)}
    esac
}}
_kt "$@"
"""


def _zsh_values(values: Values | None) -> str:
    """The end of a specification for zsh's _arguments, from the colon on."""
    if values is None:
        return ""
    if values.names:
        return f":{'chat' if values.names == 'chats' else 'model'}:_kt_{values.names}"
    if values.words and values.files:
        words = " ".join(values.words)
        return f":value:{{compadd -- {words}; {_ZSH_FILES[values.files]}}}"
    if values.words:
        return f":value:({' '.join(values.words)})"
    return f":value:{_ZSH_FILES.get(values.files, ' ')}"


def _zsh_text(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", " ")


# --- fish -------------------------------------------------------------------------------------


def _fish(found: list[Verb]) -> str:
    lines = ["# fish completion for kt; made by: kt completion fish", "complete -c kt -f"]
    for verb in found:
        first, _, second = verb.words.partition(" ")
        if not second:
            lines.append(f"complete -c kt -n __fish_use_subcommand -a {first} -d '{verb.help}'")
        seen = f"__fish_seen_subcommand_from {first}"
        if second:
            lines.append(f"complete -c kt -n '{seen}' -a {second} -d '{verb.help}'")
            seen = f"{seen}; and __fish_seen_subcommand_from {second}"
        if verb.argument is not None:
            lines.append(f"complete -c kt -n '{seen}'{_fish_values(verb.argument)}")
        for flag in verb.flags:
            takes = ""
            if flag.values is not None:
                takes = f" -{'r' if flag.values.files == 'any' else 'x'}{_fish_values(flag.values)}"
            lines.append(f"complete -c kt -n '{seen}' -l {flag.name[2:]} -d '{flag.help}'{takes}")
    return "\n".join(lines) + "\n"


_FISH_FILES = {".gguf": "__fish_complete_suffix .gguf", "folders": "__fish_complete_directories"}


def _fish_values(values: Values) -> str:
    """The options of fish's `complete` that offer these values."""
    made = [NAMES[values.names]] if values.names else []
    made += [_FISH_FILES[values.files]] if values.files in _FISH_FILES else []
    offered = " ".join((*values.words, *([f"({'; '.join(made)})"] if made else [])))
    return (f" -a '{offered}'" if offered else "") + (" -F" if values.files == "any" else "")


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
FILES = {"bash": "kt.bash", "zsh": "_kt", "fish": "kt.fish"}
