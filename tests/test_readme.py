"""The annotated tree in README.md: one line per file, its own first sentence. Made, never edited:

python tests/test_readme.py        writes it anew
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
HEADING = "## The tree\n"
SUFFIXES = (".py", ".c", ".h", ".def")
FOLDERS = ("ktcli", "native/include", "native/src")
OTHERS = {
    "profiles/models/": "published models: names, repositories, formats, configs",
    "profiles/machines/": "machines to plan for",
    "profiles/kt-mini/": "the built-in model: weights, model card, and the recipe that made them",
    "profiles/text/": "the text that kt eval reads without --text",
    "tests/": "mirrors ktcli/; native/tests/ holds the C tests, run by the same command",
    "benchmarks/": "how speeds are measured, and results with machine and date",
    "completions/": "shell completions, generated",
}
WIDTH = 120


def first_sentence(path: Path) -> str:
    """What a file says it is: the start of its docstring or of its first comment."""
    text = path.read_text()
    if path.suffix == ".py":
        found = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r"/\*\s*(?:[\w./]+ - )?(.*?)\*/", text, re.S)
        found = re.sub(r"\n \*( |$)", " ", comment.group(1)) if comment else ""
    return re.split(r"(?<=[.])\s", " ".join(found.split()))[0].rstrip(".")


def lines() -> list[str]:
    """The tree, folder by folder."""
    made = []
    for top in FOLDERS:
        folder = None
        files = [p for p in (ROOT / top).rglob("*.*") if p.suffix in SUFFIXES]
        for path in sorted(files, key=lambda path: (path.parent, path.name)):
            if path.name in ("_native.py", "__main__.py") or path.name.startswith("isa_"):
                continue
            if path.parent != folder:
                folder = path.parent
                init = folder / "__init__.py"
                about = f"  {first_sentence(init)}" if init.exists() else ""
                made.append(f"{folder.relative_to(ROOT)}/{about}"[:WIDTH])
            if path.name != "__init__.py":
                said = f"  {path.name:<22} {first_sentence(path)}"
                made.append(
                    said if len(said) <= WIDTH else said[: WIDTH - 1].rsplit(" ", 1)[0] + " …"
                )
    return [*made, *(f"{name:<22}   {about}" for name, about in OTHERS.items())]


def tree() -> str:
    return HEADING + "\n```\n" + "\n".join(lines()) + "\n```\n"


def split_readme() -> tuple[str, str, str]:
    """README before the tree, the tree, and what follows."""
    text = README.read_text()
    before, found, rest = text.partition(HEADING)
    end = rest.find("\n## ")
    return (
        before,
        found + (rest if end < 0 else rest[: end + 1]),
        "" if end < 0 else rest[end + 1 :],
    )


def test_the_tree_is_what_the_files_say() -> None:
    assert split_readme()[1].strip() == tree().strip(), "run: python tests/test_readme.py"


def test_every_file_says_what_it_is() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "_native.py":
                assert first_sentence(path), path


if __name__ == "__main__":
    before, _, after = split_readme()
    README.write_text(before.rstrip() + "\n\n" + tree() + ("\n" + after if after else ""))
    sys.exit(0)
