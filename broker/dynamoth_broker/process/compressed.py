"""Unpacks the bodies of requests that come compressed, up to a bound.

aiohttp would unpack whatever comes, also the rest of a body that was refused: a megabyte of a user without a token can
be a gigabyte then, and the event loop serves nobody else meanwhile.
"""

from __future__ import annotations

import zlib

from dynamoth.errors import MalformedMessage

CODINGS = "gzip and deflate"

_ZLIB_METHOD = 8
"""The low half of the first byte of zlib's format (RFC 1950). Some send ``deflate`` without it."""


class TooLarge(Exception):
    """Raised when a body has more bytes than are allowed, once it is unpacked."""


def coding_of(header: str) -> str:
    """Return the coding of a header ``Content-Encoding``, empty for none. Raises LookupError for another."""
    coding = header.strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise LookupError(coding)
    return coding.removeprefix("x-").replace("identity", "")


def unpacked(body: bytes, coding: str, bytes_max: int) -> bytes:
    """Return a body as it was before it was compressed. Raises MalformedMessage and TooLarge."""
    if not coding:
        return body
    bits = zlib.MAX_WBITS
    if coding == "gzip":
        bits += 16
    elif body[:1] and body[0] & 0xF != _ZLIB_METHOD:
        bits = -bits
    unpacker = zlib.decompressobj(bits)
    try:
        text = unpacker.decompress(body, bytes_max + 1)
    except zlib.error:
        raise MalformedMessage("the body is not what its Content-Encoding says") from None
    if len(text) > bytes_max:
        raise TooLarge
    if not unpacker.eof or unpacker.unused_data:
        raise MalformedMessage("the body is not what its Content-Encoding says")
    return text
