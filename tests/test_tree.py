"""The annotated tree in docs/tree.md: one line per file, its own first sentence. Made, never edited:

python tests/test_tree.py        writes it anew
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREE = ROOT / "docs" / "tree.md"
HEADING = """\
# The tree

Every file with its own first sentence, from the top floor of `ktcli/` to the C library; the path of a request
through it is in [life-of-a-request.md](life-of-a-request.md). Imports go down only. This page is generated:
`python tests/test_tree.py`.
"""
SUFFIXES = (".py", ".c", ".h", ".def")
FOLDERS = ("kt", "ktcli", "native/include", "native/src")
OTHERS = {
    "profiles/models/": "published models: names, repositories, formats, configs",
    "profiles/machines/": "machines to plan for",
    "profiles/kt-mini/": "the built-in model: weights, model card, and the recipe that made them",
    "profiles/text/": "the text that kt eval reads without --text",
    "tests/": "mirrors ktcli/; native/tests/ holds the C tests, run by the same command",
    "benchmarks/": "how speeds are measured, and results with machine and date",
    "completions/": "shell completions, generated",
}


@cache
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
                made.append(f"{folder.relative_to(ROOT)}/{about}")
            if path.name != "__init__.py":
                made.append(f"  {path.name:<22} {first_sentence(path)}")
    return [*made, *(f"{name:<22}   {about}" for name, about in OTHERS.items())]


def tree() -> str:
    return HEADING + "\n```\n" + "\n".join(lines()) + "\n```\n"


def test_the_tree_is_what_the_files_say() -> None:
    assert TREE.read_text() == tree(), "run: python tests/test_tree.py"


def test_every_file_says_what_it_is() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "_native.py":
                assert first_sentence(path), path


if __name__ == "__main__":
    TREE.write_text(tree())
