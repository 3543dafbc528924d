"""Thousands of hostile inputs to every decoder: nothing but MalformedMessage may come out of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import pack_control, unpack_control
from dynamoth.protocol.envelope import open_envelope, seal
from dynamoth.protocol.plan_wire import pack_entry, unpack_entry
from dynamoth.protocol.records import pack_rows, unpack_rows
from dynamoth.protocol.reports import pack_report, unpack_report
from tests.core.hostile import REPORT
from tests.core.strategies import (
    control_messages,
    entries,
    lies_about_length,
    mutations,
    nests,
    plans,
    recorded_rows,
    well_formed_nonsense,
)
from tests.examples import examples

VALID_HEADER = {b"@version": b"1", b"@run": b"", b"@cluster": b"\x94\x91\x92\xa2s1\xa2u1\x91\xa2s1\x08\xcd\x10\x00"}

DECODERS: tuple[Callable[[bytes], Any], ...] = (
    unpack_control,
    unpack_report,
    unpack_rows,
    unpack_entry,
    open_envelope,
    lambda data: stored_plan.parse_entry([b"1", b"", data], None),
    lambda data: stored_plan.parse_entry([data, data, None], "run"),
    lambda data: stored_plan.parse_header([b"1", data, data], "run"),
    lambda data: stored_plan.parse_whole({b"@version": b"1", b"@cluster": data}, None),
    lambda data: stored_plan.parse_whole({**VALID_HEADER, b"c:news": data}, None),
)


def decode_everywhere(data: bytes) -> None:
    for decode in DECODERS:
        with suppress(MalformedMessage):
            decode(data)


def stored_header(plan: Any) -> bytes:
    fields = stored_plan.write_whole(plan, None)[1]
    header = fields[5]
    assert isinstance(header, bytes)
    return header


VALID = st.one_of(
    control_messages.map(pack_control),
    entries().map(pack_entry),
    plans().map(stored_header),
    st.just(pack_report(REPORT)),
    recorded_rows().map(pack_rows),
    st.builds(seal, st.just(1), st.just(2), st.just(3), st.binary(max_size=8)),
)


@examples(500)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    decode_everywhere(data)


@examples(500)
@given(mutations(VALID))
def test_mutated_messages(data: bytes) -> None:
    decode_everywhere(data)


@examples(500)
@given(well_formed_nonsense)
def test_well_formed_nonsense(data: bytes) -> None:
    decode_everywhere(data)


@examples(200)
@given(nests())
def test_deep_nests(data: bytes) -> None:
    decode_everywhere(data)


@examples(200)
@given(lies_about_length())
def test_lies_about_length(data: bytes) -> None:
    decode_everywhere(data)


@pytest.mark.parametrize("depth", [400, 980, 1000, 1020, 1024, 2000])
def test_deep_nests_within_the_usual_stack(depth: int) -> None:
    """Hypothesis gives its tests a deeper stack than a daemon has; this one goes without."""
    for head in (b"", b"\x91", b"\x93\x01\xc4\x01c", b"\x93\x09\xa2s1", b"\x93\x01\x93\x01", b"\x95\x0c"):
        for opening in (b"\x91", b"\x81\xa1k"):
            decode_everywhere(head + opening * depth + b"\xc0")


def test_the_decoders_do_decode_what_is_valid() -> None:
    """So that the cases above are near misses and not far ones."""
    assert stored_plan.parse_whole(VALID_HEADER, None) is not None
    assert stored_plan.parse_header([b"1", None, VALID_HEADER[b"@cluster"]], None) is not None
