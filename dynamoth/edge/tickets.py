"""Tickets: how a broker knows that another one has asked a user to move to it.

The coordinator draws a key, announces it to all brokers with the list of those that admit users, and replaces it from
time to time. A ticket is the HMAC of the user and the session under that key: brokers take those of the present key and
of the one before. So a ticket is worth nothing to another session, and nothing after two changes of the key.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from hashlib import sha256

KEY_BYTES = 32
"""Length of a key."""


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
