"""The documents of this repository, cut into what the tests of documents look at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("[a-z]*/*.md")))

LANGUAGES = frozenset(("bash", "python", "toml", "yaml", "text"))
"""Of code blocks. ``text`` is for pictures and layouts: nothing in it can be run."""

_BLOCK = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """One code block. ``reason`` says why it is not run; None for a block that is."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return the code blocks of a page, in order."""
    text = page.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        before = text[: match.start()]
        reason = _REASON.search(before)
        line = before.count("\n") + 1
        found.append(Block(page, line, match["language"], match["text"], reason and reason["reason"]))
    return tuple(found)


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return _BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return what a link can name in a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
