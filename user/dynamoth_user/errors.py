"""What the client raises."""

from __future__ import annotations

from dynamoth.edge.interests import Interest
from dynamoth.errors import DynamothError


class RefusedError(DynamothError):
    """Raised when a broker refuses a subscription for good: ``code`` is one of ``docs/brokers.md``, "Errors"."""

    def __init__(self, interest: Interest, code: str, reason: str) -> None:
        """Keep what was refused, and why."""
        super().__init__(f"no broker subscribes to {interest.name!r}: {code}: {reason}")
        self.interest = interest
        self.code = code
        self.reason = reason


class ClientFailed(DynamothError):
    """Raised when the client has ended: by ``close``, or as no broker will serve it (``close_code`` says why)."""

    code = "client-failed"

    def __init__(self, close_code: int, reason: str) -> None:
        """Keep the close code of the WebSocket, and its reason."""
        super().__init__(f"the client has ended with code {close_code}: {reason}")
        self.close_code = close_code
        self.reason = reason


class PublishFailed(DynamothError):
    """Raised when a publication was not accepted, or nobody knows whether it was (``code`` is "unknown_outcome").

    ``retryable``: the same publication can succeed later. After "unknown_outcome" it may then be stored twice.
    """

    def __init__(self, code: str, reason: str, *, retryable: bool = False) -> None:
        """Keep why it failed."""
        super().__init__(f"not published: {code}: {reason}")
        self.code = code
        self.reason = reason
        self.retryable = retryable


class StorageError(DynamothError):
    """Raised when what a storage has loaded is not what a client has saved."""

    code = "storage"
