"""The publications of an end user's client that have no answer yet."""

from __future__ import annotations

from dynamoth.edge.frames import Error, PublishRequest
from dynamoth.edge.publications import Position
from dynamoth_user.machine.connections import Connections
from dynamoth_user.machine.events import PublishEnded, PublishMessage, SendFrame, UserAction, UserOptions

UNKNOWN_OUTCOME = "unknown_outcome"
CLOSED = "closed"
TOO_MANY_WAIT = "too_many_wait"


class Publications:
    """Sends publications while a broker serves the session, and keeps them while none does."""

    def __init__(self, options: UserOptions, connections: Connections) -> None:
        """Begin without a publication."""
        self._options = options
        self._connections = connections
        #: Publications without an answer, by ``ref``: the connection and the application's token.
        self._asked: dict[int, tuple[int, object]] = {}
        #: Publications for a connection that is not up yet, at most `unsent_max`.
        self._unsent: list[PublishMessage] = []

    def publish(self, event: PublishMessage) -> list[UserAction]:
        """Send a publication, now or when a broker serves the session."""
        serving = self._connections.serving
        if serving is None or not serving.is_up:
            if len(self._unsent) >= self._options.unsent_max:
                reason = "no broker serves the session, and too many publications wait for one"
                return [PublishEnded(event.token, None, TOO_MANY_WAIT, reason, is_retryable=True)]
            self._unsent.append(event)
            return []
        ref = self._connections.new_ref()
        self._asked[ref] = (serving.number, event.token)
        return [SendFrame(serving.number, PublishRequest(ref, event.channel, event.payload))]

    def send_waiting(self) -> list[UserAction]:
        """Send the publications that have waited for a broker."""
        unsent, self._unsent = self._unsent, []
        return [action for event in unsent for action in self.publish(event)]

    def forget(self, token: object) -> None:
        """Drop a publication that the application does not wait for: it is not sent, unless it already was."""
        self._unsent = [each for each in self._unsent if each.token is not token]
        self._asked = {ref: asked for ref, asked in self._asked.items() if asked[1] is not token}

    def is_awaited(self, number: int) -> bool:
        """Whether a connection has publications without an answer."""
        return any(connection == number for connection, _ in self._asked.values())

    def accept(self, ref: int, position: Position | None) -> list[UserAction]:
        """End a publication that a broker has accepted."""
        asked = self._asked.pop(ref, None)
        return [] if asked is None else [PublishEnded(asked[1], position)]

    def refuse(self, ref: int, error: Error) -> list[UserAction] | None:
        """End a publication that a broker has not accepted; None if ``ref`` is of something else."""
        asked = self._asked.pop(ref, None)
        if asked is None:
            return None
        return [PublishEnded(asked[1], None, error.code, error.message, is_retryable=error.retry != "never")]

    def fail(self, number: int, reason: str) -> list[UserAction]:
        """End the publications of a connection that is gone."""
        lost = [ref for ref, (connection, _) in self._asked.items() if connection == number]
        return [
            PublishEnded(self._asked.pop(ref)[1], None, UNKNOWN_OUTCOME, f"no answer: {reason}", is_retryable=True)
            for ref in lost
        ]

    def fail_all(self, reason: str) -> list[UserAction]:
        """End every publication: the client ends."""
        tokens = [*(token for _, token in self._asked.values()), *(each.token for each in self._unsent)]
        self._asked.clear()
        self._unsent.clear()
        return [PublishEnded(token, None, CLOSED, reason) for token in tokens]
