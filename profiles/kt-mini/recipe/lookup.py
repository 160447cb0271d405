"""What kt looks up for kt-mini: the rows of its tables, with the ways to name each exactly.

    python profiles/kt-mini/recipe/lookup.py

writes `rows.json` of the model folder; `docs/reference.py` does so, too. A question that names a row reaches the model
behind a system turn with the row's text (`ktcli/text/rows.py`), which it is trained to say. So it need
not be trained again for what is new.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import tables
from phrases import Fact, Phrases

from ktcli.text.rows import FILE, TOLD, KnownRow, KnownRows

PATH = tables.HERE.parent / FILE
# What is named most exactly comes first.
ORDER = ("option", "setting", "variable", "code", "slash", "format", "command", "model", "page", "family")  # fmt: skip


def known_rows(of_rows: dict[str, Fact]) -> list[KnownRow]:
    """The rows that kt looks up, from the facts that answer for the tables' rows by key."""
    made = [KnownRow(tuple(names), of_rows[key].answer) for key, names in _named().items()]
    return [row for row in made if row.names]


def lookup(phrases: Phrases) -> KnownRows:
    """The same, to be looked up."""
    return KnownRows(known_rows(phrases.of_rows()))


def told(text: str) -> tuple[str, str]:
    """The turn that comes before a question that names a row."""
    return "system", TOLD + text


def _named() -> dict[str, list[tuple[str, ...]]]:
    """The ways to name each row by its key, the exactest kinds first."""
    by_kind = {kind: {} for kind in ORDER}
    for key, names in (*_options(), *_others()):
        lower = dict.fromkeys(tuple(word.lower() for word in name) for name in names)
        by_kind[key.split()[0]][key] = list(lower)
    return {key: names for kind in ORDER for key, names in by_kind[kind].items()}


def _options() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    alone: set[str] = set()
    for key, (names, _, *words) in zip(
        tables.option_keys(), tables.read_tables()["options"], strict=True
    ):
        found = tables.flags(names)
        yield (
            key,
            [
                *((flag,) for flag in found if flag not in alone),
                *((where, flag) for where in words for flag in found),
            ],
        )
        alone |= set(found)


def _others() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    rows = tables.read_tables()
    for words, _ in rows["commands"]:
        bare = words.removeprefix("kt ")
        yield f"command {words}", [(words,), (f"{bare} command",), (f"command {bare}",)]
    for name, variable, *_ in rows["settings"]:
        yield f"setting {name}", [(variable,), (f"setting {name}",), (f"{name} setting",)]
    for name, _ in rows["variables"]:
        yield f"variable {name}", [(name,)]
    for code, _ in rows["codes"]:
        before = ("exit code", "exit status", "error code", "code", "exited with", "exits with")
        yield f"code {code}", [(f"{word} {code}",) for word in before]
    for name, *_ in rows["slash"]:
        yield f"slash {name}", [(name,)]
    for name, *_ in rows["formats"]:
        yield f"format {name}", [(name,)]
    for name, title, *_ in rows["models"]:
        yield f"model {name}", [(name,), (title,)]
    for path, _ in rows["pages"]:
        yield f"page {path}", [(path,)]
    for name, *types in rows["families"]:
        each = sorted({name, *types})
        yield f"family {name}", [
            (form,)
            for n in each
            for word in ("family", "architecture")
            for form in (f"{n} {word}", f"{word} {n}")
        ]  # fmt: skip


def text() -> str:
    """The text of rows.json, a row in each line."""
    rows = known_rows(Phrases(lambda question: False).of_rows())
    lines = ",\n".join(json.dumps([row.names, row.text]) for row in rows)
    return f'{{"rows": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
