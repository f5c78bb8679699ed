"""The pages of docs/: each is in the index once, and every link leads to a page and a heading."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
INDEX = DOCS / "README.md"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path != INDEX]
LINKING = [REPOSITORY / "README.md", REPOSITORY / "DEVELOPERS.md", INDEX, *PAGES]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def outside_code(page: Path) -> Iterator[str]:
    """Yield the lines of a page that are not in a fenced block."""
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: Counter[str] = Counter()
    names = set()
    for line in outside_code(page):
        if heading := re.match(r"#{1,6} (.+)", line):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            names.add(f"{name}-{found[name]}" if found[name] else name)
            found[name] += 1
    return names


def links(page: Path) -> list[str]:
    """Return the targets of a page's links within the repository."""
    targets = [target for line in outside_code(page) for target in _LINK.findall(line)]
    return [target for target in targets if not re.match(r"\w+:", target)]


def test_the_index_names_each_page_once() -> None:
    named = Counter((DOCS / target.partition("#")[0]).resolve() for target in links(INDEX))
    assert {page: named[page] for page in PAGES} == dict.fromkeys(PAGES, 1)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_a_heading(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"
