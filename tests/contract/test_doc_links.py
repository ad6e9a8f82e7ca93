"""Links in Markdown files lead to files and headings that exist, and the README stays short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from plait_proto import FAMILIES
from plait_testing import budgets

DOCS = budgets.tracked(".md")
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.*?)\s*$", re.MULTILINE)
MAX_README_LINES = 90


def links(text: str) -> Iterator[str]:
    """Targets inside the repository, outside of code."""
    for target in LINK.findall(CODE.sub("", text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """Of each heading, as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    made: list[str] = []
    for heading in HEADING.findall(without_blocks):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        made.append(slug if slug not in made else f"{slug}-{made.count(slug)}")
    return set(made)


def dead(source: Path, text: str) -> Iterator[str]:
    """Each link of a file that leads nowhere."""
    for target in links(text):
        name, _, anchor = unquote(target).partition("#")
        path = source if not name else (source.parent / name)
        is_there = path.exists() and path.resolve().is_relative_to(budgets.ROOT)
        if not is_there or (anchor and path.suffix == ".md" and anchor not in anchors(path.read_text("utf-8"))):
            yield target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(budgets.ROOT)))
def test_a_document_has_no_dead_link(path: Path) -> None:
    assert list(dead(path, path.read_text(encoding="utf-8"))) == []


def test_a_dead_link_is_found() -> None:
    text = "# One, two\n[a](#one-two) [b](#three) [c](nowhere.md) `[d](code.md)` [e](https://example.org)\n"
    assert list(dead(budgets.ROOT / "README.md", text)) == ["#one-two", "#three", "nowhere.md"]
    assert anchors(text) == {"one-two"}


def test_every_page_of_docs_is_in_its_index() -> None:
    docs = budgets.ROOT / "docs"
    index = set(links((docs / "README.md").read_text(encoding="utf-8")))
    assert {path.name for path in docs.glob("*.md")} - {"README.md"} <= index


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((budgets.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_page_of_models_names_every_architecture() -> None:
    page = (budgets.ROOT / "docs" / "models-and-hardware.md").read_text(encoding="utf-8")
    assert [name for family in FAMILIES for name in family.architectures if f"`{name}`" not in page] == []
