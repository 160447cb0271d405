"""What a GPU day found, made a result: one document, a table, a plot.

Called by `gpu_day.py results`. The documents of the steps are put together as they are; what a smoke run wrote is
refused. The table and the plot show what the plans promised beside what came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from naming import slug

Row = Mapping[str, Any]
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 320, 60, 40  # of the plot, and where its axes cross
_COLOURS = "#2f6f9f", "#b03a2e", "#4c8c4a", "#8a6d3b"


@dataclass(frozen=True, slots=True)
class Found:
    """A day's documents.

    Attributes:
        date: of its first document, ISO.
        machine: the facts of where it ran.
        sections: the rows of each section of gpu_hybrid.py.
        rest: everything else, by the name of its file.
    """

    date: str
    machine: Row
    sections: Mapping[str, Any]
    rest: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the result, without an ending."""
        return f"{self.date}-gpu-{slug(self.machine.get('gpu'))}"

    def document(self) -> dict[str, Any]:
        known = {"date": self.date, "machine": self.machine, "sections": self.sections}
        return known | dict(self.rest)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The rows that have a speed, with their section, or the name of the file with kt's own documents."""
        for name, section in self.sections.items():
            for row in section.get("rows", ()):
                if "tok_s" in row:
                    yield name, row
        for name, documents in self.rest.items():
            for document in documents if isinstance(documents, list) else ():
                for row in document.get("results", ()):
                    if "tok_s" in row:
                        yield name, row


def found_in(folder: Path) -> Found:
    """Reads the folder --out of a day.

    Raises:
        ValueError: there is nothing in it that is a result, and why.
    """
    documents = {path.stem: _read(path) for path in sorted(folder.glob("*.json*"))}
    hybrid = {name: each for name, each in documents.items() if name.startswith("hybrid-")}
    if not hybrid:
        raise ValueError(f"{folder} has no hybrid-*.json, which say what machine it was")
    if any(each["smoke"] for each in hybrid.values()):
        raise ValueError(f"{folder} is of a smoke run: its figures are no results")
    first = min(hybrid.values(), key=lambda each: str(each["date"]))
    sections: dict[str, Any] = {}
    for each in hybrid.values():
        sections |= each["sections"]
    rest = {name: each for name, each in documents.items() if name not in hybrid}
    return Found(first["date"], first["machine"], sections, rest)


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    lines = path.suffix == ".jsonl"
    return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)


# --- for people -------------------------------------------------------------------------------------


def table(found: Found) -> str:
    """Everything that has a speed, in Markdown: what was promised, what came, and how far apart they are."""
    head = "| section | what | tokens/s | predicted | off by | of the ceiling |"
    lines = [head, "|---|---|---:|---:|---:|---:|"]
    for name, row in found.rows():
        promised = row.get("planned_tok_s", row.get("predicted_tok_s"))
        off = "" if not promised else f"{100 * (promised / row['tok_s'] - 1):+.0f} %"
        share = row.get("percent_of_ceiling")
        cells = (
            name,
            _what(row),
            f"{row['tok_s']:.4g}{' (noisy)' if row.get('noisy') else ''}",
            f"{promised:.4g}" if promised else "",
            off,
            "" if share is None else f"{share:.0f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _what(row: Row) -> str:
    """What tells a row from the others of its section."""
    shown = (
        "work",
        "model",
        "way",
        "policy",
        "handoff",
        "n_tokens",
        "batch",
        "gpu_experts",
        "defer",
    )
    return ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in shown if key in row)


def plot(found: Found) -> str:
    """Decode for 0 to all experts on the GPU, without deferral, as an SVG: measured solid, predicted dashed."""
    lines: list[tuple[str, Sequence[tuple[float, float]], bool]] = []
    for name, section in found.sections.items():
        rows = [row for row in section.get("rows", ()) if row.get("work") == "decode"]
        alone = [row for row in rows if name.startswith("decode ") and row["defer"] == 0]
        for key, dashed in (("tok_s", False), ("predicted_tok_s", True)):
            if alone:
                lines.append((name, [(row["gpu_experts"], row[key]) for row in alone], dashed))
    most_x = max((x for _, points, _ in lines for x, _ in points), default=0) or 1
    most_y = max((y for _, points, _ in lines for _, y in points), default=0) or 1
    title = f"Decode on {found.machine.get('gpu')}: measured solid, predicted dashed"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<text x="{_LEFT}" y="20">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _TOP}H{_WIDTH - 20}" fill="none" stroke="black"/>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 10}">0 … {most_x:g} experts of a layer on the GPU</text>',
        f'<text x="4" y="{_TOP + 4}">{most_y:.4g}</text><text x="4" y="{_TOP + 18}">tokens/s</text>',
    ]
    for number, (name, points, dashed) in enumerate(lines):
        places = [
            f"{_LEFT + x / most_x * (_WIDTH - _LEFT - 20):.1f},"
            f"{_HEIGHT - _TOP - y / most_y * (_HEIGHT - 2 * _TOP):.1f}"
            for x, y in points
        ]
        colour = _COLOURS[number // 2 % len(_COLOURS)]
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        drawn.append(
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}"{dashes}/>'
        )
        if not dashed:
            drawn.append(
                f'<text x="{_LEFT + 8}" y="{_TOP + 8 * number}" fill="{colour}">{escape(name)}</text>'
            )
    return "\n".join([*drawn, "</svg>"]) + "\n"


def keep(found: Found, into: Path) -> list[Path]:
    """Writes document, table and plot into a folder; returns their paths."""
    texts = {
        ".json": json.dumps(found.document(), indent=1) + "\n",
        ".md": table(found),
        ".svg": plot(found),
    }
    paths = []
    for ending, text in texts.items():
        paths.append(into / f"{found.name}{ending}")
        paths[-1].write_text(text, encoding="utf-8")
    return paths
