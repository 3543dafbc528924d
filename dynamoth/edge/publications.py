"""A publication of a logged interest, as it comes on the interest's Dynamoth channel."""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.protocol.wire import pack, parser, read_array, read_bytes, read_natural, unpack

EPOCH_BITS = 64


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a log: the publication ``offset`` of the epoch ``epoch``. Offset 0: before the first."""

    epoch: int
    offset: int


@dataclass(frozen=True, slots=True)
class LoggedPublication:
    """One publication with its position in the log."""

    epoch: int
    offset: int
    #: None: a notice, whoever wants it reads it in the log.
    payload: bytes | None


def pack_publication(publication: LoggedPublication) -> bytes:
    """Return the payload for the interest's channel."""
    return pack([publication.epoch, publication.offset, publication.payload])


@parser("a logged publication")
def unpack_publication(data: bytes) -> LoggedPublication:
    """Read a payload of an interest's channel. Raises MalformedMessage."""
    epoch, offset, payload = read_array(unpack(data))
    return LoggedPublication(
        read_natural(epoch), read_natural(offset), None if payload is None else read_bytes(payload)
    )
