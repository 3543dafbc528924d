"""Redis' own glob patterns, as ``stringmatchlen`` of its ``util.c`` understands them.

``*`` any bytes, ``?`` one byte, ``[abc]``, ``[a-z]``, ``[^a]`` one of a class, backslash the next byte literally. Where
Redis surprises, so does this: a pattern of stars does not match the empty name, ``]`` always ends a class, one that is
not closed ends with the pattern, and ranges compare signed bytes (as on x86).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from dynamoth.names import RESERVED_PREFIX, replica_pattern

_ANY = frozenset(range(256))

_Token = frozenset[int] | None
"""One byte out of a set; None is a star."""

_Tokens = tuple[_Token, ...]

SPLIT_MAX = 256
"""Most parts of a split pattern; a pattern that needs more (many stars, as in ``*?*?*?*``) is not split."""


def compile_glob(pattern: bytes) -> re.Pattern[bytes]:
    """Return an expression whose ``fullmatch`` tells whether a name matches ``pattern``, in Redis' sense."""
    return _expression(_parse(pattern))


def physical_patterns(pattern: bytes) -> tuple[bytes, ...]:
    """Return the patterns to subscribe to at each server so that every name that ``pattern`` matches is seen.

    The last one is for replicated channels. The others match the names that ``pattern`` matches apart from those under
    the reserved prefix. Otherwise the subscriber would get, and would count as a receiver of, the messages between
    agents and clients; senders of control messages learn from the count whether anybody received them. A name may match
    several of these.
    """
    tokens = _parse(pattern)
    split = list(islice(_outside(tokens, RESERVED_PREFIX), SPLIT_MAX + 1))
    if len(split) > SPLIT_MAX or split == [tokens]:
        return (pattern, replica_pattern(pattern))
    return (*dict.fromkeys(_glob(part) for part in split if part), replica_pattern(pattern))


def patterns_without(*prefixes: bytes) -> tuple[bytes, ...]:
    """Return patterns that match every name but those with one of these prefixes; each name matches exactly one."""
    parts: list[_Tokens] = [(None,)]
    for prefix in prefixes:
        parts = [rest for part in parts for rest in _outside(part, prefix)]
    return tuple(_glob(part) for part in parts if part)


def matches_reserved(pattern: bytes) -> bool:
    """Tell whether a pattern may match names under the reserved prefix."""
    tokens = _parse(pattern)
    return list(islice(_outside(tokens, RESERVED_PREFIX), SPLIT_MAX + 1)) != [tokens]


def literal_glob(name: bytes) -> bytes:
    """Return a pattern that matches one name only."""
    return _glob(tuple(frozenset((byte,)) for byte in name))


def bytes_spelled(pattern: bytes, prefix: bytes) -> int:
    """Return how many bytes of ``prefix`` a pattern spells out before its first star.

    0 if it matches no name that begins with ``prefix``, as far as that shows before the star.
    """
    tokens = _parse(pattern)
    spelled = 0
    for token, byte in zip(tokens, prefix, strict=False):
        if token is None:
            return spelled
        if byte not in token:
            return 0
        spelled += len(token) == 1
    return spelled if len(tokens) >= len(prefix) else 0


# Patterns as tokens.


def _parse(pattern: bytes) -> _Tokens:
    tokens: list[_Token] = []
    at = 0
    while at < len(pattern):
        byte = pattern[at]
        at += 1
        if byte == ord("*"):
            if not tokens or tokens[-1] is not None:
                tokens.append(None)
        elif byte == ord("?"):
            tokens.append(_ANY)
        elif byte == ord("["):
            members, at = _parse_class(pattern, at)
            tokens.append(members)
        else:
            if byte == ord("\\") and at < len(pattern):
                byte = pattern[at]
                at += 1
            tokens.append(frozenset((byte,)))
    return tuple(tokens)


def _parse_class(pattern: bytes, at: int) -> tuple[frozenset[int], int]:
    """Read a class from behind its bracket on; return it, and where the pattern goes on."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at] != ord("]"):
        if pattern[at] == ord("\\") and at + 1 < len(pattern):
            members.add(pattern[at + 1])
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            first, last = sorted((_signed(pattern[at]), _signed(pattern[at + 2])))
            members.update(byte & 0xFF for byte in range(first, last + 1))
            at += 3
        else:
            members.add(pattern[at])
            at += 1
    return (_ANY - members if negated else frozenset(members)), at + 1


def _signed(byte: int) -> int:
    return byte - 256 if byte >= 128 else byte


def _expression(tokens: _Tokens) -> re.Pattern[bytes]:
    """A star takes as little as what follows needs, and never more: so the time is bounded as Redis' is."""
    parts: list[bytes] = [b"(?s)"]
    open_star = False
    stars = sum(token is None for token in tokens)
    for token in tokens:
        if token is not None:
            parts.append(_class_expression(token))
            continue
        if open_star:
            parts.append(b")")
        stars -= 1
        open_star = stars > 0
        parts.append(b"(?>.*?" if open_star else b".*")
    if all(token is None for token in tokens) and tokens:
        parts = [b"(?s).+"]
    return re.compile(b"".join(parts))


def _class_expression(members: frozenset[int]) -> bytes:
    if members == _ANY:
        return b"."
    if not members:
        return b"(?!)"
    return b"[" + b"".join(b"\\x%02x" % byte for byte in sorted(members)) + b"]"


def _glob(tokens: _Tokens) -> bytes:
    """Return a pattern of these tokens."""
    return b"".join(b"*" if token is None else _class_glob(token) for token in tokens)


def _class_glob(members: frozenset[int]) -> bytes:
    if len(members) == 1:
        [byte] = members
        return b"\\%c" % byte if byte in b"*?[\\" else b"%c" % byte
    if members == _ANY:
        return b"?"
    if len(members) > len(_ANY) // 2:
        return b"[^" + _escaped(_ANY - members) + b"]"
    return b"[" + _escaped(members) + b"]"


def _escaped(members: frozenset[int]) -> bytes:
    return b"".join(b"\\%c" % byte for byte in sorted(members))


def _outside(tokens: _Tokens, prefix: bytes) -> Iterator[_Tokens]:
    """Yield patterns that together match the names that ``tokens`` match and that do not begin with ``prefix``."""
    if not prefix:
        return
    if not tokens:
        yield ()
        return
    first, rest = tokens[0], tokens[1:]
    head = prefix[0]
    if first is None:
        yield from _outside(rest, prefix)
        yield (_ANY - {head}, None, *rest)
        deeper = _outside(tokens, prefix[1:])
    elif head not in first:
        yield tokens
        return
    else:
        if others := first - {head}:
            yield (others, *rest)
        deeper = _outside(rest, prefix[1:])
    for tail in deeper:
        yield (frozenset((head,)), *tail)
