"""Reading msgpack from anyone: bounded in depth, in width and in memory, whatever the bytes are.

Every parser of control messages, reports and stored plans reads its bytes with :func:`unpack`, checks each value with
the ``read_...`` functions, and is a :func:`parser`. So hostile bytes cost little, and nothing but ``MalformedMessage``
comes out of a parser.
"""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgpack

from dynamoth.errors import MalformedMessage

DEPTH_MAX = 32
"""Containers within containers. Our deepest message, a change of the plan, has 8."""

ARRAY_MAX = 16_384
"""Elements of one array or map. A report names 10,000 channels at most, and a change of the plan has as many entries.
msgpack allocates an array by the length that it claims, so this bounds what a few bytes can make it allocate."""

COUNTED_BYTES = 64 * 1024
"""From this size on the elements of a message are counted. A smaller one cannot make more than a few MB of objects."""

ELEMENTS_MAX = 1_000_000
"""Elements of a large message over all of its containers: about 64 MB of objects at the worst."""

NUMBER_MAX = 2**64 - 1
"""Numbers of msgpack, and ids of ours, have 64 bits."""

_CONTAINERS = frozenset((list, dict))

P = ParamSpec("P")
R = TypeVar("R")


def pack(value: Any) -> bytes:
    """Serialise a value as msgpack."""
    packed: bytes = msgpack.packb(value)
    return packed


def unpack(data: bytes, *, check_depth: bool = True) -> Any:
    """Read one msgpack value from anyone. Raises MalformedMessage.

    Without ``check_depth`` the depth has only msgpack's own bound, 1024: for callers that check the type of every value
    that they take, and take no containers of unknown depth.
    """
    count = None if len(data) < COUNTED_BYTES else _ElementCounter().count
    longest = min(len(data), ARRAY_MAX)  # an element takes a byte at least
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=False,
            max_array_len=longest,
            max_map_len=longest,
            list_hook=count,
            object_pairs_hook=None if count is None else lambda pairs: dict(count(pairs)),
        )
    except MalformedMessage:
        raise
    except Exception as error:
        raise MalformedMessage(f"not msgpack: {type(error).__name__}: {error!s:.200}") from error
    if check_depth and len(data) > DEPTH_MAX:  # each level takes a byte at least
        _check_depth(value)
    return value


class _ElementCounter:
    """Refuses a message that has too many elements, while it is read."""

    def __init__(self) -> None:
        self._elements = 0

    def count(self, elements: Any) -> Any:
        self._elements += len(elements) + 1
        if self._elements > ELEMENTS_MAX:
            raise MalformedMessage(f"a message has at most {ELEMENTS_MAX} elements, this one has more")
        return elements


def _check_depth(value: Any) -> None:
    level: list[list[Any] | dict[Any, Any]] = [[value]]
    for _ in range(DEPTH_MAX + 1):
        deeper: list[list[Any] | dict[Any, Any]] = []
        for container in level:
            elements = container.values() if isinstance(container, dict) else container
            if not _CONTAINERS.isdisjoint(map(type, elements)):
                deeper += [element for element in elements if type(element) in _CONTAINERS]
        if not deeper:
            return
        level = deeper
    raise MalformedMessage(f"a message has at most {DEPTH_MAX} containers within each other, this one has more")


def parser(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function that reads ``what`` from anyone raise ``MalformedMessage`` in place of any other exception.

    For functions without side effects only: there an exception says that the input is not what it claims to be.
    """

    def decorate(read: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(read)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return read(*args, **kwargs)
            except MalformedMessage:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {shortened(str(error))}"
                raise MalformedMessage(f"{what} cannot be read: {reason}") from error

        return guarded

    return decorate


def read_bytes(value: Any) -> bytes:
    """Check that a value is bytes, and return it. Raises MalformedMessage."""
    if not isinstance(value, bytes):
        raise MalformedMessage(f"bytes expected, not {shortened(value)}")
    return value


def read_text(value: Any, characters_max: float = math.inf) -> str:
    """Check that a value is text of at most ``characters_max``, and return it. Raises MalformedMessage."""
    if not isinstance(value, str) or len(value) > characters_max:
        raise MalformedMessage(f"text expected, not {shortened(value)}")
    return value


def read_natural(value: Any, maximum: int = NUMBER_MAX) -> int:
    """Check that a value is a number from 0 to ``maximum``, and return it. Raises MalformedMessage."""
    if type(value) is not int or not 0 <= value <= maximum:
        raise MalformedMessage(f"a number from 0 to {maximum} expected, not {shortened(value)}")
    return value


def read_array(value: Any) -> list[Any]:
    """Check that a value is an array, and return it. Raises MalformedMessage."""
    if not isinstance(value, list):
        raise MalformedMessage(f"an array expected, not {shortened(value)}")
    array: list[Any] = [*value]
    return array


def read_text_map(value: Any) -> dict[str, Any]:
    """Check that a value is a map with text keys, and return a copy. Raises MalformedMessage."""
    if not isinstance(value, dict):
        raise MalformedMessage(f"a map expected, not {shortened(value)}")
    mapping: dict[Any, Any] = {**value}
    if not all(isinstance(key, str) for key in mapping):
        raise MalformedMessage(f"a map with text keys expected, not {shortened(value)}")
    return mapping


SHORT_MAX = 200
"""Characters of a hostile value in an error text."""


class _Short(reprlib.Repr):
    """``reprlib.Repr`` that never makes the whole ``repr`` of a value first."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxlist = self.maxdict = 3

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Show the beginning of bytes, and how many there are."""
        return repr(value) if len(value) <= self.maxstring else f"{value[: self.maxstring]!r}... ({len(value)} bytes)"

    def repr_instance(self, x: Any, level: int) -> str:
        """Show no more than the type of anything else that msgpack or a server can give, but for simple values."""
        return repr(x) if x is None or isinstance(x, (bool, float)) else f"<{type(x).__name__}>"


_short = _Short()


def shortened(value: Any) -> str:
    """Return a short ``repr`` of a hostile value, in little time whatever its size and depth."""
    return cut(_short.repr(value), SHORT_MAX)


def cut(text: str, characters_max: int) -> str:
    """Return a text of at most ``characters_max``: the last one is an ellipsis where the text is longer."""
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"
