"""Each record of the client's machines has one writer: no other module of its folder sets its fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dynamoth_client.machines

MACHINES = Path(next(iter(dynamoth_client.machines.__path__)))

RECORDS = {
    "register.py": ("Registered",),
    "subscriber/subscription.py": ("Place", "Subscription"),
    "subscriber/listening.py": ("SubscriberLink",),
    "patterns/subscription.py": ("PatternPlace", "PatternSubscription", "PatternName", "PatternLink"),
    "publisher/channels.py": ("PublishedChannel",),
    "publisher/waiting.py": ("Waiting", "Unconfirmed", "Together", "HandOver"),
}
"""Module to its records."""

MUTATORS = frozenset(["add", "append", "clear", "discard", "pop", "popitem", "remove", "setdefault", "update"])
"""Methods that change a container."""


@dataclass(frozen=True)
class Write:
    """A field that is set, deleted, or whose container is changed."""

    field: str
    line: int


def fields(module: str, *names: str) -> set[str]:
    """Return the fields of some classes of a module: those that are annotated in the class, or set in ``__init__``."""
    tree = ast.parse((MACHINES / module).read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in names:
            annotated = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            found |= {each.id for each in annotated if isinstance(each, ast.Name)}
            found |= {write.field for write in _writes(node, of_self=True)}
    return found


def _writes(tree: ast.AST, *, of_self: bool = False) -> Iterator[Write]:
    """Yield the writes of attributes, of ``self`` or of all others."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value] if isinstance(node.func.value, ast.Attribute) else []
        for target in targets:
            yield from _written(target, of_self)


def _written(target: ast.expr, of_self: bool) -> Iterator[Write]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _written(element, of_self)
    elif isinstance(target, ast.Subscript):
        yield from _written(target.value, of_self)
    elif isinstance(target, ast.Attribute):
        is_self = isinstance(target.value, ast.Name) and target.value.id == "self"
        if is_self == of_self:
            yield Write(target.attr, target.lineno)


OTHERS = {"publisher": {"confirmed", "tokens", "version"}}
"""Folder to fields that a record without this rule has there, too: ``PublisherServer``."""


def strangers(source: str, folder: str, owned: set[str]) -> list[Write]:
    """Return the writes in a module's text to fields that others own."""
    return [write for write in _writes(ast.parse(source)) if write.field in owned - OTHERS.get(folder, set())]


@pytest.mark.parametrize("owner", RECORDS)
def test_no_other_module_writes_its_records(owner: str) -> None:
    owned = fields(owner, *RECORDS[owner])
    folder = owner.rpartition("/")[0]
    readers = [path for path in (MACHINES / folder).rglob("*.py") if path != MACHINES / owner]
    assert owned and readers
    found = {
        f"{path.relative_to(MACHINES)}:{write.line} {write.field}"
        for path in readers
        for write in strangers(path.read_text(), path.parent.name, owned)
    }
    assert not found


@pytest.mark.parametrize(
    "statement",
    [
        "place.lost = None",
        "a, place.lost = place.lost, None",
        "subscription.turn += 1",
        "del subscription.targets[location]",
        "subscription.targets[location] = place",
        "subscription.leaving.pop(location)",
    ],
)
def test_every_kind_of_write_is_found(statement: str) -> None:
    owned = fields("subscriber/subscription.py", "Place", "Subscription")
    assert {"lost", "turn", "targets", "leaving"} <= owned
    assert len(strangers(statement, "subscriber", owned)) == 1
    assert not strangers(statement.replace("place.", "self.").replace("subscription.", "self."), "subscriber", owned)
