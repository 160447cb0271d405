"""`kt completion SHELL`: a completion script for a shell, made from the commands themselves.

Hidden; `completions/` holds its output and packages install it from there. Commands and options are
written into the script, so that completing costs nothing; only model names are asked of `kt names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ktcli.commands.table import COMMANDS, load
from ktcli.errors import UsageError
from ktcli.output import out


@dataclass(frozen=True, slots=True)
class Verb:
    """One command line to complete: "pull", or "bench decode".

    Attributes:
        words: command and subcommand.
        help: its line in the help.
        options: long options with their help; those that take a value are in `valued`.
        choices: what the arguments can be: "models", "here" (models on disk), "files", or the subcommands.
    """

    words: str
    help: str
    options: tuple[tuple[str, str], ...]
    valued: frozenset[str]
    choices: tuple[str, ...]


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
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
    options, valued, argument = [], set(), ""
    for parameter in command.params:
        flags = [flag for flag in parameter.opts if flag.startswith("--")]
        if parameter.param_type_name == "argument":
            argument = argument or _kind(words, str(parameter.metavar or parameter.name))
            continue
        for flag in flags:
            options.append((flag, _line(getattr(parameter, "help", "") or "")))
            if not getattr(parameter, "is_flag", False):
                valued.add(flag)
    options.append(("--help", "Show this message and exit."))
    choices = tuple(children) or ((argument,) if argument else ())
    here = Verb(words, _line(summary), tuple(options), frozenset(valued), choices)
    below = [v for n, c in children.items() for v in _verbs(f"{words} {n}", c.help or "", c)]
    return [here, *below]


def _kind(words: str, metavar: str) -> str:
    """What completes an argument: names of models, of those on disk, or files."""
    if any(word in metavar.upper() for word in ("MODEL", "NAME")):
        return "here" if words in ("rm", "verify", "convert") else "models"
    return "files"


# Shell words that print the names for each kind of argument.
NAMES = {"models": "kt names 2>/dev/null", "here": "kt names --here 2>/dev/null"}


def _line(text: str) -> str:
    """The first sentence of a help text, on one line, safe between single quotes."""
    first = " ".join(text.split("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".").replace("'", "’").replace("`", "")


# --- bash -------------------------------------------------------------------------------------


def _bash(found: list[Verb]) -> str:
    cases, values = [], []
    for verb in found:
        flags = " ".join(flag for flag, _ in verb.options)
        words = "" if verb.choices == ("files",) else " ".join(verb.choices)
        cases.append(f"        '{verb.words}') options='{flags}'; words='{words}' ;;")
        values += sorted(verb.valued)
    top = " ".join(verb.words for verb in found if " " not in verb.words)
    families = "|".join(
        v.words for v in found if any(o.words.startswith(f"{v.words} ") for o in found)
    )
    return f"""\
# bash completion for kt; made by: kt completion bash
_kt() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} options='' words='' verb=''
    COMPREPLY=()
    case $before in
        {"|".join(sorted(set(values)))}) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{top} --help --version" -- "$word"))
        return
    fi
    verb=${{COMP_WORDS[1]}}
    case $verb in
        {families}) ((COMP_CWORD > 2)) && verb="$verb ${{COMP_WORDS[2]}}" ;;
    esac
    case $verb in
{chr(10).join(cases)}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    elif [[ $word == */* || -z $words ]]; then
        COMPREPLY=($(compgen -f -- "$word"))
    else
        case $words in
            models) words=$({NAMES["models"]}) ;;
            here) words=$({NAMES["here"]}) ;;
        esac
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    fi
}}
# A colon is part of hf:org/repo.
COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}
complete -o filenames -F _kt kt
"""


# --- zsh --------------------------------------------------------------------------------------


def _zsh(found: list[Verb]) -> str:
    top = "\n".join(f"        '{v.words}:{v.help}'" for v in found if " " not in v.words)
    cases = []
    for verb in found:
        specs = [
            f"'{flag}[{_zsh_text(text)}]{':value:_files' if flag in verb.valued else ''}'"
            for flag, text in verb.options
        ]
        if verb.choices and verb.choices[0] in NAMES:
            specs.append(f"'*:model:_kt_{verb.choices[0]}'")
        elif verb.choices == ("files",):
            specs.append("'*:file:_files'")
        elif verb.choices:
            specs.append(f"'1:verb:({' '.join(verb.choices)})'")
        joined = " \\\n            ".join(specs)
        cases.append(f"        '{verb.words}') _arguments -s \\\n            {joined} ;;")
    families = "|".join(
        v.words for v in found if any(o.words.startswith(f"{v.words} ") for o in found)
    )
    return f"""\
#compdef kt
# zsh completion for kt; made by: kt completion zsh
_kt_models() {{
    compadd -- ${{(f)"$({NAMES["models"]})"}}
    _files -/
}}
_kt_here() {{
    compadd -- ${{(f)"$({NAMES["here"]})"}}
    _files -/
}}
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
        {families})
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
        if verb.choices and verb.choices[0] in NAMES:
            names = NAMES[verb.choices[0]]
            lines.append(f"complete -c kt -n '{seen}' -a '({names}; __fish_complete_directories)'")
        elif verb.choices == ("files",):
            lines.append(f"complete -c kt -n '{seen}' -F")
        for flag, text in verb.options:
            takes = " -r -F" if flag in verb.valued else ""
            lines.append(f"complete -c kt -n '{seen}' -l {flag[2:]} -d '{text}'{takes}")
    return "\n".join(lines) + "\n"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
FILES = {"bash": "kt.bash", "zsh": "_kt", "fish": "kt.fish"}
