"""`kt completion`: a completion script for a shell, generated from the commands themselves, and its installation.

`completions/` holds the scripts and packages install them from there. Commands, options and the values that they
take are written into them, so that completing costs nothing; only names that change are asked of `kt names`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from ktcli.commands.cli.completable import SHELLS, Values, Verb, verbs
from ktcli.commands.cli.declarations import argument
from ktcli.commands.cli.startup import ScriptPlace, install, place_of, uninstall
from ktcli.errors import UsageError
from ktcli.output import out
from ktcli.settingsfile import shown


def completion(
    what: Annotated[
        str,
        argument(
            "bash|zsh|fish|install|uninstall",
            "Shell to print the script for, or install or uninstall.",
        ),
    ],
    shell: Annotated[
        str | None,
        argument("SHELL", "Shell to install it for. Default: the one that $SHELL names."),
    ] = None,
) -> None:
    """Install shell completion of commands, options and names.

    Named alone, a shell's script is printed. The script is the same until kt is updated; then install it again.

    Examples:

      kt completion install

      kt completion install zsh

      kt completion uninstall

      kt completion fish > ~/.config/fish/completions/kt.fish
    """
    if what in ("install", "uninstall"):
        place = place_of(_known(shell) if shell else _own())
        done = install(place, script(place.shell)) if what == "install" else uninstall(place)
        out.result(
            {"shell": place.shell, "changed": [str(path) for path in done]},
            _words(place, done, installed=what == "install"),
        )
        return
    text = script(_known(what))
    out.result({"shell": what, "script": text}, text, exact=True)


def _known(shell: str) -> str:
    if shell not in SHELLS:
        hint = f"kt supports {', '.join(SHELLS)}: kt completion install bash"
        raise UsageError(f"there is no completion for {shell[:60]!r}", hint=hint)
    return shell


def _own() -> str:
    """The shell of this person, as the system tells it to every program."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise UsageError(
            f"SHELL is {os.environ.get('SHELL', '')[:60]!r}, for which kt has no completion",
            hint="name one: kt completion install bash (or zsh, fish)",
        )
    return name


def _words(place: ScriptPlace, done: list[Path], *, installed: bool) -> str:
    """What was changed, what takes it back, and how it begins to work."""
    if not installed:
        return "\n".join(f"{shown(path)}: removed what kt wrote" for path in done) or (
            f"There is no completion for {place.shell} to remove."
        )
    lines = [f"wrote {shown(place.script)}"] if place.script in done else []
    if place.startup is not None and place.startup in done:
        lines.append(f"added a line to {shown(place.startup)}")
    if not lines:
        lines.append(f"{shown(place.script)} is already up to date")
    begin = f"source {shown(place.startup)}" if place.startup else "nothing more is needed"
    lines.append(f"It works in new terminals; to use it in this one:  {begin}")
    lines.append(f"undo: kt completion uninstall {place.shell}")
    return "\n".join(lines)


def script(shell: str) -> str:
    """Returns the text of the completion script for a shell: "bash", "zsh" or "fish"."""
    return _SCRIPTS[shell](verbs())


# Shell words that print the names of each kind; of models a file may be named instead.
NAMES = {
    "all": "kt names 2>/dev/null",
    "here": "kt names --here 2>/dev/null",
    "mine": "kt names --mine 2>/dev/null",
    "chats": "kt names --chats 2>/dev/null",
    "gpus": "kt names --gpus 2>/dev/null",
}


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
    for word, offered in verb.follows:
        alike.setdefault(_bash_values(offered), []).append(word)
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

# Kinds of names in whose place no file can be, and what they are called.
_NO_FILES = {"chats": "chat", "gpus": "device"}
_ZSH_FILES = {"any": "_files", ".gguf": '_files -g "*.gguf"', "folders": "_files -/"}


def _zsh(found: list[Verb]) -> str:
    top = "\n".join(f"        '{v.words}:{v.help}'" for v in found if " " not in v.words)
    names = "\n".join(
        f'_kt_{kind}() {{\n    compadd -- ${{(f)"$({words})"}}'
        + ("" if kind in _NO_FILES else f"\n    {_ZSH_FILES['.gguf']}")
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
{chr(10).join(map(_zsh_case, found))}
    esac
}}
_kt "$@"
"""


def _zsh_case(verb: Verb) -> str:
    """The case of zsh that offers the options and arguments of a command."""
    specs = [
        f"'{flag.name}[{_zsh_text(flag.help)}]{_zsh_values(flag.values)}'" for flag in verb.flags
    ]
    if verb.argument is not None:
        specs.append(f"'{'*' if verb.several else '1'}{_zsh_values(verb.argument)}'")
        specs += [f"'2:value:{{{_zsh_following(verb)}}}'"] if verb.follows else []
    elif verb.children:
        specs.append(f"'1{_zsh_values(Values(verb.children))}'")
    joined = " \\\n            ".join(specs)
    return f"        '{verb.words}') _arguments -s \\\n            {joined} ;;"


def _zsh_following(verb: Verb) -> str:
    """The statement of zsh that offers the second argument of a command, by the first."""
    cases = []
    for word, values in verb.follows:
        offers = [f"compadd -- {' '.join(values.words)}"] if values.words else []
        offers += [f"_kt_{values.names}"] if values.names else []
        offers += [_ZSH_FILES[values.files]] if values.files else []
        cases.append(f"{word}) {'; '.join(offers)} ;;")
    return f"case $line[1] in {' '.join(cases)} esac"


def _zsh_values(values: Values | None) -> str:
    """The end of a specification for zsh's _arguments, from the colon on."""
    if values is None:
        return ""
    if values.names:
        words = f"compadd -- {' '.join(values.words)}; " if values.words else ""
        call = f"_kt_{values.names}"
        what = _NO_FILES.get(values.names, "model")
        return f":{what}:{{{words}{call}}}" if words else f":{what}:{call}"
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
        for word, values in verb.follows:
            after = f"{seen}; and test (commandline -opc)[-1] = {word}"
            lines.append(f"complete -c kt -n '{after}'{_fish_values(values)}")
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


_SCRIPTS = dict(zip(SHELLS, (_bash, _zsh, _fish), strict=True))
FILES = {"bash": "kt.bash", "zsh": "_kt", "fish": "kt.fish"}
