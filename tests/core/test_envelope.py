"""The envelope: what is sealed is what is opened, and its bytes on the wire never change silently."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage
from dynamoth.plan.plan import EPOCH_MAX
from dynamoth.protocol.envelope import (
    FIRST,
    FORWARDED,
    HEADER_BYTES,
    KNOWN_FLAGS,
    MAGIC,
    QUIET_MS_MAX,
    ROUTE_CHANGED,
    SEQUENCE_MAX,
    Envelope,
    forwarded,
    is_enveloped,
    open_envelope,
    seal,
)

identities = st.integers(0, 2**64 - 1)
sequences = st.integers(0, SEQUENCE_MAX)
epochs = st.integers(0, EPOCH_MAX)
flags = st.integers(0, KNOWN_FLAGS)
envelopes = st.builds(Envelope, flags, identities, sequences, epochs, st.binary(), st.integers(0, QUIET_MS_MAX))


def sealed(envelope: Envelope) -> bytes:
    flag, publisher, sequence, epoch, payload, quiet_ms = envelope
    return seal(publisher, sequence, epoch, payload, flag, quiet_ms)


@given(envelopes)
def test_what_is_sealed_is_opened(envelope: Envelope) -> None:
    data = sealed(envelope)
    assert is_enveloped(data)
    assert open_envelope(data) == envelope
    assert len(data) == HEADER_BYTES + len(envelope.payload)


def test_layout_on_the_wire() -> None:
    data = seal(0x0102030405060708, 0x111213141516, 0x21222324, b"payload", FIRST | ROUTE_CHANGED, 0x1718)
    assert data == bytes.fromhex("d70d01 06 0102030405060708 111213141516 1718 21222324") + b"payload"


@given(envelopes, epochs, st.sampled_from((0, ROUTE_CHANGED)))
def test_a_forwarded_copy_differs_in_marks_and_epoch_only(envelope: Envelope, newer: int, more: int) -> None:
    copy = open_envelope(forwarded(sealed(envelope), newer, more))
    assert copy == envelope._replace(flags=envelope.flags | FORWARDED | more, epoch=newer)


@given(st.text())
def test_no_text_looks_like_an_envelope(text: str) -> None:
    assert not is_enveloped(text.encode())


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        *((seal(1, 2, 3, b"")[:length], f"this one has {length}") for length in range(HEADER_BYTES)),
        (b"\xd7\x0d\x02" + seal(1, 2, 3, b"")[len(MAGIC) :], "not an envelope"),
        *((seal(1, 2, 3, b"", flag), "newer than this software") for flag in (0x40, 0x80, 0xFF)),
    ],
)
def test_refuses_what_is_cut_another_magic_and_flags_of_a_newer_version(data: bytes, cause: str) -> None:
    with pytest.raises(MalformedMessage, match=cause):
        open_envelope(data)
