"""Tickets: how a broker knows that another one has asked a user to move to it.

A coordinator announces a key to all brokers, with the list of those that admit users, and another key every
``KEY_PERIOD_S``. A ticket is the HMAC of the user and the session under that key: brokers take those of the latest key
and of the one before. So a ticket is worth nothing to another session, and nothing after a minute. It needs no clocks
that agree.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from hashlib import blake2b, sha256

KEY_BYTES = 32

KEY_PERIOD_S = 30.0
"""A key is used for new tickets for this time."""


def key_of_period(secret: bytes, now: float) -> bytes:
    """Return the key for new tickets, by the coordinator's own secret (empty: no key, empty) and its clock."""
    return blake2b(b"%d" % (now // KEY_PERIOD_S), key=secret, digest_size=KEY_BYTES).digest() if secret else b""


def make_ticket(key: bytes, user: str, session: str) -> str:
    """Return the ticket of a session: 43 characters."""
    digest = hmac.digest(key, f"{session}\n{user}".encode(), sha256)
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


def is_ticket(ticket: str | None, keys: Iterable[bytes], user: str, session: str) -> bool:
    """Return whether this is a ticket of the session under one of these keys."""
    if ticket is None:
        return False
    given = ticket.encode()
    return any(hmac.compare_digest(make_ticket(key, user, session).encode(), given) for key in keys)
