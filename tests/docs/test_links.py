"""Every link and every file that a document names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, prose

_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_FILE = re.compile(r"`(?P<path>(?:[\w.-]+/)+[\w.-]+\.(?:md|py|toml|txt|yml|yaml|json|sh))(?:::\w+)?`")
_PAGE = re.compile(r"(?<![\w/])docs/[\w-]+\.md")


@cache
def files() -> tuple[str, ...]:
    """Return the paths of all files of the repository, each behind a slash."""
    tops = [top for top in ROOT.iterdir() if not top.name.startswith(".") or top.name == ".ci"]
    found = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    return tuple(f"/{path.relative_to(ROOT)}" for path in found if path.is_file())


def problems(page: Path, text: str) -> list[str]:
    """Return what the text of a page names and nobody finds."""
    found: list[str] = []
    for match in _LINK.finditer(text):
        target = match["target"]
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists():
            found.append(f"a link to {target}, which does not exist")
        elif anchor and anchor not in anchors(linked):
            found.append(f"a link to {target}, but no heading makes that anchor")
    for match in _FILE.finditer(text):
        path = match["path"]
        if not any(name.endswith(f"/{path}") for name in files()):
            found.append(f"the file {path}, which does not exist")
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_document_names_exists(page: Path) -> None:
    assert problems(page, prose(page)) == []


def test_what_code_says_of_documents_exists() -> None:
    """Comments, docstrings and texts for users name pages of ``docs/``."""
    missing: dict[str, set[str]] = {}
    for path in files():
        if path.endswith((".py", ".toml")) and not path.startswith("/tests/docs/"):
            named = set(_PAGE.findall((ROOT / path[1:]).read_text()))
            if unknown := {name for name in named if not (ROOT / name).exists()}:
                missing[path[1:]] = unknown
    assert missing == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](docs/nothing.md)", "a link to docs/nothing.md, which does not exist"),
        ("[x](README.md#nothing)", "a link to README.md#nothing, but no heading makes that anchor"),
        ("see `tests/nothing.py`", "the file tests/nothing.py, which does not exist"),
        ("[x](README.md#use-it), `tests/docs/pages.py`, `docs/pages.py`", None),
    ],
)
def test_what_is_missing_is_found(text: str, problem: str | None) -> None:
    assert problems(ROOT / "README.md", text) == ([] if problem is None else [problem])
