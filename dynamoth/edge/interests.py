"""What an end user can subscribe to, and the names that brokers give it.

An *interest* is a channel of the application, a standing query with parameters, or the presence of a channel: who joins
it and leaves it. Two subscriptions are to the same interest exactly when kind, name and parameters mean the same: ``1``
and ``1.0`` do, ``"1"`` does not (BAD, section 2: brokers share identical subscriptions).
"""

from __future__ import annotations

import json
import math
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal, get_args

from dynamoth.errors import MalformedMessage
from dynamoth.names import RESERVED_PREFIX
from dynamoth.protocol.wire import shortened

Kind = Literal["channel", "query", "presence"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ID_BYTES = 16
ID_CHARACTERS = 22
"""Characters of an interest id: 128 bits in base64url without padding."""

NAME_BYTES_MAX = 1024
"""Longest name of a channel or query."""

PARAMS_BYTES_MAX = 4096
"""Longest canonical form of parameters."""

LOG_CHANNEL_PREFIX = b"q:"
"""Prefix of the channels on which logged interests are published: one ACL pattern covers them."""

_OF_SERVERS = LOG_CHANNEL_PREFIX, b"d:", b"__keyspace@", b"__keyevent@"
"""How the names of channels begin that are those of logs, datasets, or Redis itself."""

EXACT_INTEGER_MAX = 2**53
"""Above this, a number of JSON is not exact in every language."""

Scalar = str | int | float | bool | None
"""A value of a parameter."""


@dataclass(frozen=True)
class Interest:
    """A channel, its presence, or a query with canonical parameters. Made by ``channel_interest`` and its like."""

    kind: Kind
    name: str
    #: Canonical JSON of the parameters; ``{}`` for a channel and its presence.
    params: str = "{}"

    @cached_property
    def id(self) -> str:
        """The id, the same everywhere: 22 characters."""
        text = "\n".join((self.kind, self.name, self.params)).encode()
        digest = blake2b(text, digest_size=ID_BYTES).digest()
        return urlsafe_b64encode(digest).rstrip(b"=").decode()

    @property
    def values(self) -> dict[str, Scalar]:
        """The values of the parameters."""
        values: dict[str, Scalar] = json.loads(self.params)
        return values

    @property
    def is_reserved(self) -> bool:
        """Whether the name of a channel is one of Dynamoth's own, of logs, datasets, or Redis: for no end user."""
        name = self.name.encode()
        return name.startswith(RESERVED_PREFIX) or (self.kind != "query" and name.startswith(_OF_SERVERS))

    @property
    def log_channel(self) -> bytes:
        """The Dynamoth channel on which publications of the interest come if it is logged."""
        return LOG_CHANNEL_PREFIX + self.id.encode()


def is_bound(interest: Interest, bound: Mapping[str, Scalar]) -> bool:
    """Tell whether parameters of a query have the values to which a token binds them: ``1`` and ``True`` differ."""
    values = interest.values
    return all(name in values and canonical({name: values[name]}) == canonical({name: bound[name]}) for name in bound)


def channel_interest(name: object) -> Interest:
    """Return the interest of a channel. Raises MalformedMessage."""
    return Interest("channel", _read_name(name))


def presence_interest(channel: object) -> Interest:
    """Return the interest in who is present on a channel. Raises MalformedMessage."""
    return Interest("presence", _read_name(channel))


def query_interest(name: object, params: object) -> Interest:
    """Return the interest of a standing query. Raises MalformedMessage."""
    return Interest("query", _read_name(name), canonical(params))


def _read_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise MalformedMessage(f"a name expected, not {shortened(name)}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise MalformedMessage("a name has to be valid Unicode: it has half of a surrogate pair") from None
    if size > NAME_BYTES_MAX:
        raise MalformedMessage(f"a name has at most {NAME_BYTES_MAX} bytes, this one has {size}")
    return name


def canonical(params: object) -> str:
    """Return the canonical JSON of parameters, equal exactly where they mean the same (as RFC 8785).

    Raises MalformedMessage: not a map of names to scalars, a number that is not finite or not exact, or too long.
    """
    if not isinstance(params, Mapping):
        raise MalformedMessage(f"parameters are a map, not {shortened(params)}")
    values: dict[str, Scalar] = {}
    for name, value in params.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(name, str):
            raise MalformedMessage(f"the name of a parameter is text, not {shortened(name)}")
        values[name] = value  # pyright: ignore[reportUnknownVariableType]
    text = "{" + ",".join(f"{_text(name)}:{_scalar(name, values[name])}" for name in sorted(values)) + "}"
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise MalformedMessage("parameters have to be valid Unicode") from None
    if size > PARAMS_BYTES_MAX:
        raise MalformedMessage(f"parameters have at most {PARAMS_BYTES_MAX} bytes, these have {size}")
    return text


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _scalar(name: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        if abs(value) > EXACT_INTEGER_MAX:
            raise MalformedMessage(f"parameter {shortened(name)}: a number above 2^53 is not exact: give it as text")
        return str(value)
    if isinstance(value, float):
        return _number(name, value)
    raise MalformedMessage(f"parameter {shortened(name)} is a string, number, boolean or null, not {shortened(value)}")


def _number(name: str, value: float) -> str:
    """Return a number as ECMAScript writes it."""
    if not math.isfinite(value):
        raise MalformedMessage(f"parameter {shortened(name)} is not a finite number")
    if value == int(value) and abs(value) <= EXACT_INTEGER_MAX:
        return str(int(value))
    digits, _, exponent = repr(value).partition("e")
    if not exponent:
        return digits if abs(value) >= 1e-6 else _small(value)
    power = int(exponent)
    if -7 <= power < 0:
        return _small(value)
    if 0 <= power < 21:
        return str(int(value))
    return f"{digits}e{power:+d}"


def _small(value: float) -> str:
    """Return a number between 1e-7 and 1e-4 without an exponent, where Python writes one and ECMAScript does not."""
    digits, _, exponent = repr(value).partition("e")
    if not exponent:
        return digits
    power = int(exponent)
    if power < -7 or (power == -7 and abs(value) < 1e-6):
        return f"{digits}e{power:+d}"
    sign = "-" if digits.startswith("-") else ""
    whole = digits.lstrip("-").replace(".", "")
    return f"{sign}0.{'0' * (-power - 1)}{whole}"
