"""What a page of a report refers to and contains, for tests."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path


class PageReader(HTMLParser):
    """Collects the page's tags, ids, and every attribute that could reach out of it."""

    VOID = frozenset({"meta", "link", "wbr", "path", "use", "rect", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.references.append(value or "")


def words_of(page: Path) -> str:
    """Return what a reader sees, on one line: no markup, style sheets or scripts."""
    text = re.sub(r"<(style|script).*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
