"""Reads and writes the frames of the user protocol: one object per message, as JSON or msgpack.

Users are not trusted. :func:`parse_json` and :func:`parse_msgpack` return only objects that every part of the broker
can handle: strings that can be encoded, finite numbers, no name twice, no deep nesting. Everything else is a
:class:`~dynamoth.errors.MalformedMessage` with a reason that can be sent back.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Literal, NoReturn, cast

import msgpack

from dynamoth.errors import MalformedMessage

Frame = dict[str, Any]
"""One object of the protocol. It always has string keys; see docs/brokers.md for its fields."""

Encoding = Literal["json", "msgpack"]

FRAME_BYTES_MAX = 64 * 1024
"""Bound of one message from a user, with all of its fragments: 1,000 subscriptions with parameters fit."""

DEPTH_MAX = 16
"""Bound of nesting. The protocol itself needs 4 levels; the rest is for payloads that users nest by mistake."""

INTEGER_DIGITS_MAX = 20
"""An integer with more digits than 64 bits need is refused before it is converted, as that takes quadratic time."""

_INTEGER_MAX = 2**64 - 1


def parse_json(data: bytes | bytearray) -> Frame:
    """Return the object in the text ``data``.

    Raises:
        UnicodeDecodeError: ``data`` is not UTF-8.
        MalformedMessage: it is not JSON, or not an object, or one of its values is refused.

    """
    text = data.decode()
    try:
        value = _read_json(text)
    except RecursionError:
        raise MalformedMessage(f"nested deeper than {DEPTH_MAX}") from None
    except json.JSONDecodeError as error:
        raise MalformedMessage(f"not JSON: {error.msg} at {error.pos}") from None
    # Both are rare, and looking at each value is slow: nesting takes brackets, and a lone surrogate takes an escape.
    if "\\u" in text or text.count("[") + text.count("{") > DEPTH_MAX:
        _check(value)
    return _as_frame(value)


def parse_msgpack(data: bytes | bytearray) -> Frame:
    """Return the object in ``data``.

    Raises:
        MalformedMessage: it is not one msgpack object, or one of its values is refused.

    """
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            ext_hook=_refuse_extension,
        )
    except MalformedMessage:
        raise
    except RecursionError:
        raise MalformedMessage(f"nested deeper than {DEPTH_MAX}") from None
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {type(error).__name__}") from None
    _check(value)
    return _as_frame(value)


def encode_json(frame: Frame, payload: bytes | None = None) -> bytes:
    """Return ``frame`` as compact JSON in UTF-8; ``payload`` becomes ``d`` where it is UTF-8, else ``b`` in base64."""
    if payload is not None:
        try:
            frame = {**frame, "d": payload.decode()}
        except UnicodeDecodeError:
            frame = {**frame, "b": base64.b64encode(payload).decode()}
    return _encoder.encode(frame).encode()


def encode_msgpack(frame: Frame, payload: bytes | None = None) -> bytes:
    """Return ``frame`` as msgpack; ``payload`` becomes the string ``d`` where it is UTF-8, else the bytes ``b``."""
    if payload is not None:
        try:
            frame = {**frame, "d": payload.decode()}
        except UnicodeDecodeError:
            frame = {**frame, "b": payload}
    packed = msgpack.packb(frame)
    assert packed is not None
    return packed


def _unique(pairs: list[tuple[str, Any]]) -> Frame:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise MalformedMessage("a name occurs twice in an object")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise MalformedMessage(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise MalformedMessage("a number is out of range")
    return number


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > INTEGER_DIGITS_MAX:
        raise MalformedMessage("a number is out of range")
    number = int(text)
    if abs(number) > _INTEGER_MAX:
        raise MalformedMessage("a number is out of range")
    return number


def _refuse_extension(_code: int, _data: bytes) -> NoReturn:
    raise MalformedMessage("extension types of msgpack are not part of the protocol")


_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_read_json = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
).decode


def _check(value: Any) -> None:
    """Check types, numbers and nesting, without recursion. Raises MalformedMessage."""
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for each in level:
            match each:
                case dict():
                    mapping = cast(Frame, each)
                    _check_strings(mapping)
                    below.extend(mapping.values())
                case list():
                    below += [*each]
                case str():
                    _check_strings((each,))
                case float():
                    if not math.isfinite(each):
                        raise MalformedMessage("a number is out of range")
                case None | bool() | int() | bytes():
                    pass
                case _:
                    raise MalformedMessage(f"{type(each).__name__} is not part of the protocol")
        if not below:
            return
        level = below
    raise MalformedMessage(f"nested deeper than {DEPTH_MAX}")


def _check_strings(strings: Any) -> None:
    """Check that strings can be encoded: JSON can escape half of a surrogate pair. Raises MalformedMessage."""
    for each in strings:
        if not isinstance(each, str):
            raise MalformedMessage("a name that is not a string")
        try:
            each.encode()
        except UnicodeEncodeError:
            raise MalformedMessage("half of a surrogate pair") from None


def _as_frame(value: Any) -> Frame:
    if not isinstance(value, dict):
        raise MalformedMessage("not an object")
    return cast(Frame, value)
