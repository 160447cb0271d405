"""The documents stay short, and what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
TOOL_FILE = re.compile(r"`((?:[a-z_]+/)+[\w.]+\.(?:py|c|h|def|md|toml))`")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!word)[\w`]", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 20 < len(rows) <= 60


def test_the_classes_in_the_glossary_exist() -> None:
    rows = re.findall(r"^\|.*", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"`([A-Z][a-z]\w+)`", row)}
    sources = "".join(path.read_text() for path in (ROOT / "ktcli").rglob("*.py"))
    assert len(named) > 15
    assert [name for name in sorted(named) if f"\nclass {name}" not in sources] == []


def test_the_life_of_a_request_names_files_that_exist() -> None:
    named = TOOL_FILE.findall((ROOT / "docs" / "life-of-a-request.md").read_text())
    folders = ROOT, ROOT / "ktcli", ROOT / "native" / "src", ROOT / "docs"
    assert len(named) > 15
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_the_picture_asks_for_nothing_from_outside() -> None:
    picture = ROOT / "docs" / "first-minute.svg"
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    assert not re.search(r"""(href|url\()\W*https?:""", picture.read_text())
