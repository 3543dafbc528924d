"""What mutations are made of: production code with one remedy switched off, and what is broken then."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from dynamoth_dispatcher.machine import DispatcherMachine

Mutation = Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Generator[None]:
    """Replace attributes of a class or module within the block, and restore them at its end."""
    originals = {name: owner.__dict__[name] for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: replaces a function or method whose result is ignored."""


def no_actions(*_: Any, **__: Any) -> list[Any]:
    """Return no actions: replaces a method of a machine."""
    return []


def returning(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value`` whatever it is called with."""
    return lambda *_, **__: value


def uncorrected(mutation: Mutation) -> Mutation:
    """Return a mutation under which agents do not correct who is misplaced, either: that would hide the fault."""

    @wraps(mutation)
    @contextmanager
    def both() -> Generator[None]:
        with mutation(), replaced(DispatcherMachine, _catch_up_with=no_actions):
            yield

    return both


@dataclass(frozen=True, slots=True)
class Check:
    """A scenario, what makes it fail, and the guarantee that is broken then ("expected": what the script expects)."""

    scenario: str
    mutation: Mutation
    broken: str
