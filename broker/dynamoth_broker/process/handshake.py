"""Answers the request that begins a WebSocket connection: path, origin and subprotocol."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from http import HTTPStatus

from websockets.datastructures import MultipleValuesError
from websockets.exceptions import NegotiationError
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import LoggerLike, Subprotocol

PATH = "/connect"

JSON = Subprotocol("dynamoth.v1.json")
MSGPACK = Subprotocol("dynamoth.v1.msgpack")

ORIGIN_CHARACTERS_MAX = 100
"""Of a refused origin, in the log."""

REQUEST_BYTES_MAX = 16 * 1024
"""Bound of the request of a handshake; browsers send less than 1 KB, and cookies of the site up to 8 KB."""


def log_refused_origin(origin: str) -> None:
    """Log that a page may not connect: browsers do not say it to the page. The log bounds what is repeated."""
    cause = "its origin is not among broker.origins"
    _log.warning("a page is refused", extra={"cause": cause, "origin": origin[:ORIGIN_CHARACTERS_MAX]})


class Handshake(ServerProtocol):
    """Parses the request, and chooses the subprotocol that the client prefers. Compression is never negotiated."""

    def __init__(self, frame_bytes_max: int, logger: LoggerLike) -> None:
        super().__init__(subprotocols=[JSON, MSGPACK], max_size=frame_bytes_max, logger=logger)

    def answer(self, request: Request, origins: Collection[str]) -> Response:
        """Return the answer: 101, or an error. A request without an origin comes from no page, and is accepted."""
        if request.path.partition("?")[0] != PATH:
            return self.reject(HTTPStatus.NOT_FOUND, f"Users connect at {PATH}.\n")
        try:
            origin = request.headers.get("Origin")
        except MultipleValuesError:
            return self.reject(HTTPStatus.BAD_REQUEST, "More than one Origin.\n")
        if origin is not None and origin not in origins:
            log_refused_origin(origin)
            return self.reject(HTTPStatus.FORBIDDEN, "Pages of this origin may not connect.\n")
        return self.accept(request)

    def select_subprotocol(self, subprotocols: Sequence[Subprotocol]) -> Subprotocol | None:
        """Return the first that is known. Raises NegotiationError if there is none, which is answered with 400."""
        for each in subprotocols:
            if each in (JSON, MSGPACK):
                return each
        raise NegotiationError(f"the subprotocol is {JSON} or {MSGPACK}")


_log = logging.getLogger("dynamoth.broker.handshake")
