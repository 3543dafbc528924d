"""Logs why no broker serves the client: each reason once, and few in a time, however often the client tries again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from ssl import SSLCertVerificationError, SSLError
from urllib.parse import urlsplit

from websockets.exceptions import InvalidMessage, InvalidStatus

COMPLAINT_S = 10.0
"""Time between two warnings, at least."""

REASONS_MAX = 100
"""Reasons that are remembered; with more, all of them may be logged again."""

BODY_CHARACTERS_MAX = 200
"""Of a broker's answer that refuses a connection."""

_log = logging.getLogger("dynamoth_user")


class Complaints:
    """What was logged since a broker served the client.

    Args:
        now: a clock, in seconds.

    """

    def __init__(self, now: Callable[[], float]) -> None:
        """Begin with nothing logged."""
        self._now = now
        self._logged: set[str] = set()
        self._next_at = 0.0

    def add(self, text: str, url: str) -> None:
        """Log a text, unless it was logged already, or another one a moment ago: then it may be logged later."""
        text = f"{text} ({shown(url)})"
        now = self._now()
        if text in self._logged or now < self._next_at:
            return
        if len(self._logged) >= REASONS_MAX:
            self._logged.clear()
        self._logged.add(text)
        self._next_at = now + COMPLAINT_S
        _log.warning("%s", text)

    def clear(self) -> None:
        """Forget what was logged: a broker serves the client."""
        self._logged.clear()


def why_not_connected(error: Exception, url: str) -> str:
    """Return why a connection could not be opened, and what helps."""
    if isinstance(error, InvalidStatus):
        response = error.response
        body = bytes(response.body or b"").decode(errors="replace").strip()[:BODY_CHARACTERS_MAX]
        answer = f"{response.status_code} {body or response.reason_phrase}".strip()
        is_elsewhere = response.status_code == HTTPStatus.NOT_FOUND and "/connect" not in body
        cure = ": brokers serve users at `broker.port`, and the path /connect" if is_elsewhere else ""
        return f"cannot connect: the server has answered {answer}{cure}"
    cause = str(error) or type(error).__name__
    if isinstance(error, SSLCertVerificationError):
        return f"cannot connect: {cause}: give `ssl` a context that knows the authority of this certificate"
    is_plain = isinstance(error, SSLError) and error.reason == "WRONG_VERSION_NUMBER"
    if is_plain or isinstance(error, InvalidMessage | EOFError | ConnectionResetError):
        other = "ws://" if url.startswith("wss:") else "wss://"
        return f"cannot connect: {cause}: is this the port of a broker, and not to be reached by {other}?"
    if isinstance(error, ConnectionRefusedError):
        return f"cannot connect: {cause}: does the broker run, and listen at this address?"
    return f"cannot connect: {cause}"


def shown(url: str) -> str:
    """Return a URL without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
