"""The tables of kt as facts: what every command, option, setting, exit code, format, family, model and page is.

Reads `facts/tables.json`, which `docs/reference.py` writes from kt itself, and `facts/today.toml`, which has ways to
ask for some of the rows. A row is known by its key, such as "option --stop"; a fact of another file that answers for
a row names the key in its `rows`. So nothing can be in kt that kt-mini is not taught, but what came after its
training: `LEARNED` in the model folder has the keys of that day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LEARNED = HERE.parent / "learned.json"
FORMAT_WORDS = {
    "nl4": "with non-linear steps, closer together near zero,",
    "nl4-g32": "with non-linear steps, closer together near zero,",
    "int4-row-had": "rotated by a Hadamard matrix so that one scale serves a whole row,",
    "mxfp4": "with a small exponent of its own, as gpt-oss is published,",
    "int8-row": "with one scale per row, not rotated",
    "fp8": "with an exponent of its own, as deepseek-v3 is published,",
}


@cache
def read_tables() -> dict[str, list[list[str]]]:
    """The tables of kt by name; each row begins with what it is known by."""
    tables: dict[str, list[list[str]]] = json.loads((HERE / "facts" / "tables.json").read_text())
    return tables


def flags(names: str) -> list[str]:
    """`-n, --max-tokens N` -> `--max-tokens`; several of one row stay several."""
    return re.findall(r"--[a-z][a-z-]*", names)


def option_keys() -> list[str]:
    """The key of each row of the options; the first of a flag has it alone, others name their command."""
    keys: list[str] = []
    for names, _, *words in read_tables()["options"]:
        flag = flags(names)[0]
        key = f"option {flag}"
        keys.append(key if key not in keys else f"option {words[0]} {flag}")
    return keys


def row_keys() -> list[str]:
    """The keys of all rows."""
    kinds = {
        "commands": "command", "settings": "setting", "variables": "variable", "codes": "code", "slash": "slash",
        "formats": "format", "families": "family", "models": "model", "pages": "page",
    }  # fmt: skip
    plain = (f"{kind} {row[0]}" for table, kind in kinds.items() for row in read_tables()[table])
    return [*option_keys(), *plain]


def clean(text: str) -> str:
    """ASCII without brackets, the form of every answer."""
    text = text.replace("\u2026", "...").replace("[", "").replace("]", "")
    return " ".join(text.encode("ascii", "ignore").decode().split())


def lower_first(text: str) -> str:
    """For the middle of a sentence; acronyms stay."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def short(text: str, most: int = 40) -> str:
    """The first sentences of a text that are at most `most` words together."""
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.;]) (?=[A-Z1-9a-z])", text):
        if kept and len(" ".join([*kept, sentence]).split()) > most:
            break
        kept.append(sentence)
    return re.sub(r"[;:]$", ".", " ".join(kept))


def rows() -> Iterator[dict[str, Any]]:
    """A fact of each row, as in the files: id (its key), answer, kind, names, weight."""
    for make in (
        _commands,
        _options,
        _settings,
        _variables,
        _codes,
        _slash,
        _formats,
        _families,
        _models,
        _pages,
    ):
        yield from make()


# Verbs that meanings in the tables begin with: such a meaning is a goal of the person who asks.
VERBS = frozenset(
    """
    answer ask bring call carry change check choose clear compare convert copy draw drop end find
    follow forget get give go hide import export keep leave let list load measure name open pick
    plan print put read record refuse remove rename run save see send serve set show start stop sum
    switch take talk try turn undo use verify write
    """.split()
)


def goals(meaning: str) -> list[str]:
    """What a person wants who needs the row: the first clause of its meaning, if that begins with a verb."""
    clause = lower_first(clean(re.split(r"[.;:,(]", meaning)[0]))
    verb, _, rest = clause.partition(" ")
    return [clause] if verb in VERBS and rest else []


def _fact(
    key: str, kind: str, answer: str, names: list[str], weight: float, meaning: str = ""
) -> dict[str, Any]:
    return {
        "id": key, "rows": [key], "kind": kind, "answer": short(clean(answer)), "names": names, "goals": goals(meaning),
        "weight": weight,
    }  # fmt: skip


def _commands() -> Iterator[dict[str, Any]]:
    for words, meaning in read_tables()["commands"]:
        bare = words.removeprefix("kt ")
        names = [
            words,
            words,
            f"the command {words}",
            f"the {bare} command",
            bare if " " in bare else words,
        ]
        yield _fact(
            f"command {words}", "command", f"{words}: {lower_first(meaning)}", names, 1.0, meaning
        )


def _options() -> Iterator[dict[str, Any]]:
    settings = {option for _, _, option, *_ in read_tables()["settings"] if option}
    plain: set[str] = set()
    for key, (names, meaning, *words) in zip(option_keys(), read_tables()["options"], strict=True):
        found = flags(names)
        if key == f"option {found[0]}" and found[0] in settings:
            continue  # the setting answers for it
        where = words[0] if len(words) == 1 else f"{words[0]} and others"
        said: list[str] = [f"{words[0]} {f}" for f in found] + [
            f"{f} [in|of] {words[0]}" for f in found
        ]
        for flag in (f for f in found if f not in plain):
            bare = flag.removeprefix("--")
            said += [
                flag,
                flag,
                f"the {flag} [flag|option]",
                f"the {bare} [flag|option|switch]",
                f"the option {flag}",
            ]
        plain |= set(found)
        weight = 0.3 if words[0].startswith("kt bench") else 0.9
        yield _fact(
            key, "flag", f"{names} ({where}): {lower_first(meaning)}", said, weight, meaning
        )


def _settings() -> Iterator[dict[str, Any]]:
    of = {flag: flags(names) for names, *_ in read_tables()["options"] for flag in flags(names)}
    for name, variable, option, default, meaning in read_tables()["settings"]:
        said = " or ".join(of.get(option, ()))  # --think has a second name, --no-think
        first = f"{said} or {variable}" if option else variable
        answer = f"{first} (setting {name}): {lower_first(meaning)} Default: {default}."
        names = [
            variable,
            variable,
            f"the variable {variable}",
            f"the setting {name}",
            f"the {name} setting",
            variable.lower(),
        ]
        if option:
            names += [
                option,
                option,
                f"kt chat {option}",
                f"the {option} [flag|option]",
                f"the {name} option",
            ]
        yield _fact(f"setting {name}", "flag", answer, names, 0.9, meaning) | {
            "rows": [f"setting {name}", *([f"option {option}"] if option else [])]
        }


def _variables() -> Iterator[dict[str, Any]]:
    for name, meaning in read_tables()["variables"]:
        names = [
            name,
            name,
            f"the variable {name}",
            f"the environment variable {name}",
            name.lower(),
        ]
        yield _fact(f"variable {name}", "flag", f"{name}: {lower_first(meaning)}", names, 0.7)


def _codes() -> Iterator[dict[str, Any]]:
    for code, meaning in read_tables()["codes"]:
        names = [
            f"[exit|return|error|] [code|status] {code}",
            f"exit [code|] {code}",
            f"code {code} [of kt|from kt]",
            f"kt [exits|ended|died|stopped|failed|returns] with {code}",
            f"[a|the|] [status|code|return value] {code} [in my shell script|in a script|from kt|of kt|]",
        ]
        yield _fact(f"code {code}", "code", f"Exit code {code} of kt means: {meaning}.", names, 0.8)


def _slash() -> Iterator[dict[str, Any]]:
    for name, usage, meaning in read_tables()["slash"]:
        line = f"{name} {usage}".strip()
        names = [
            name,
            name,
            f"the {name} command",
            f"the command {name}",
            f"{name} in [the|a] chat",
        ]
        yield _fact(
            f"slash {name}", "slash", f"{line} in the chat: {meaning}.", names, 0.8, meaning
        )


def _formats() -> Iterator[dict[str, Any]]:
    for name, bits, group in read_tables()["formats"]:
        scale = f" with a scale per {group} weights" if group else ""
        words = FORMAT_WORDS.get(name, "")
        answer = f"{name} is a {bits}-bit number format of weights {words}{scale}."
        answer += f" kt convert NAME --experts {name} uses it."
        names = [
            name,
            name,
            f"the format {name}",
            f"the {name} format",
            f"the number format {name}",
            f"--experts {name}",
        ]
        yield _fact(f"format {name}", "concept", answer, names, 0.5)


def _families() -> Iterator[dict[str, Any]]:
    for name, *types in read_tables()["families"]:
        answer = f"Yes, kt runs models of the family {name}. kt plan org/repo looks at one without its weights."
        said = sorted({name, *types})
        names = [
            n
            for t in said
            for n in (
                f"[models of|] the family {t}",
                f"[the|models of] type {t}",
                f"the {t} architecture",
            )
        ]
        yield _fact(f"family {name}", "family", answer, names, 0.12)


def _models() -> Iterator[dict[str, Any]]:
    taken: set[str] = set()
    for name, title, licence, parameters, size in sorted(
        read_tables()["models"], key=lambda row: len(row[0])
    ):
        billions = int(parameters) / 1e9
        count = f"{billions:.0f}" if billions >= 10 else f"{billions:.1f}"
        answer = (
            f"kt plan {name} says whether it fits this machine, and how fast it would be. It has {count} billion "
            f"parameters, {int(size) / 2**30:.1f} GiB to download, and the licence {licence}."
        )
        plain = re.sub(r"-a\d+b(?=-|$)", "", name)
        plain = re.sub(r"-a\d+b(?=-|$)", "", name)  # without the size of what works on a token
        said = {name, title.lower(), plain} | {re.sub(r"-\d+b$", "", plain)} - {"qwen3", "qwen2"}
        said |= {s.replace("-", " ") for s in said} | {
            re.sub(r"-(?=[vk]?\d)", " ", s) for s in said
        }
        said -= taken
        taken |= said
        yield _fact(f"model {name}", "model", answer, sorted(said), 0.6)


def _pages() -> Iterator[dict[str, Any]]:
    for path, title in read_tables()["pages"]:
        topic = path.removeprefix("docs/").removesuffix(".md").replace("-", " ")
        answer = f"{path} is a page of kt's documentation: {title}."
        names = [
            path,
            f"the page {path}",
            f"the page [on|about] {topic}",
            f"the {topic} page [of the docs|]",
        ]
        yield _fact(f"page {path}", "page", answer, names, 0.12)
