from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.edge.frames import Data, read_broker_frame, read_user_frame
from dynamoth.edge.interests import ID_CHARACTERS
from dynamoth.errors import MalformedMessage
from dynamoth_broker.process.frames import (
    DEPTH_MAX,
    encode_json,
    encode_msgpack,
    parse_json,
    parse_msgpack,
)
from dynamoth_broker.process.transport import prepare


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


REFUSED_JSON = {
    "not JSON": b'{"type":',
    "empty": b"",
    "two objects": b"{}{}",
    "a list": b"[1]",
    "a number": b"1",
    "NaN": b'{"a":NaN}',
    "infinity": b'{"a":-Infinity}',
    "a number out of range": b'{"a":1e999}',
    "an integer out of range": b'{"a":18446744073709551616}',
    "a huge integer": b'{"a":' + b"1" * 60_000 + b"}",
    "a name twice": b'{"a":1,"a":1}',
    "a name twice, below": b'{"x":[{"a":1,"a":2}]}',
    "half of a surrogate pair": b'{"a":"\\ud800"}',
    "half of a surrogate pair as a name": b'{"\\udfff":1}',
    "nested": json.dumps({"a": nested(DEPTH_MAX)}).encode(),
    "nested beyond the stack": b'{"a":' + b"[" * 60_000,
    "nested objects beyond the stack": b'{"a":' * 12_000,
    "line break in a string": b'{"a":"\n"}',
}

REFUSED_MSGPACK = {
    "empty": b"",
    "truncated": msgpack.packb({"type": "connect"})[:-1],
    "two objects": msgpack.packb({}) * 2,
    "a list": msgpack.packb([1]),
    "NaN": msgpack.packb({"a": float("nan")}),
    "infinity": msgpack.packb({"a": [float("inf")]}),
    "an extension": msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
    "a timestamp": msgpack.packb({"a": msgpack.Timestamp(1)}),
    "a number as a name": msgpack.packb({1: 2}),
    "bytes as a name": msgpack.packb({b"a": 2}),
    "a name twice": b"\x82\xa1a\x01\xa1a\x02",
    "a string that is not UTF-8": b"\x81\xa1a\xa1\xff",
    "nested": msgpack.packb({"a": nested(DEPTH_MAX)}),
    "nested beyond the stack": b"\x81\xa1a" + b"\x91" * 60_000,
    "a list that claims to be huge": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a list as a name": b"\x81\x91\x01\x01",
    "the byte that nothing is": b"\x81\xa1a\xc1",
}


@pytest.mark.parametrize("data", REFUSED_JSON.values(), ids=REFUSED_JSON.keys())
def test_refuses_json(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_json(data)


@pytest.mark.parametrize("data", REFUSED_MSGPACK.values(), ids=REFUSED_MSGPACK.keys())
def test_refuses_msgpack(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_msgpack(data)


def test_text_that_is_not_utf_8_is_another_error_as_it_has_another_close_code() -> None:
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'{"a":"\xff"}')


def test_accepts_what_is_at_the_bounds() -> None:
    frame = {"a": nested(DEPTH_MAX - 2), "b": 2**64 - 1, "c": -0.0, "d": "\U0001f600 [{[{[{[{[{[{[{[{[{[{"}
    assert parse_json(json.dumps(frame).encode()) == frame
    assert parse_msgpack(msgpack.packb(frame)) == frame


def test_refused_reasons_have_no_text_of_the_user() -> None:
    with pytest.raises(MalformedMessage) as caught:
        parse_json(b'{"secret":NaN,"secret":1')
    assert "secret" not in str(caught.value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), values))
def test_reads_what_it_writes(frame: dict[str, Any]) -> None:
    assert parse_json(encode_json(frame)) == frame
    assert parse_msgpack(encode_msgpack(frame)) == frame


@given(st.binary())
def test_anything_is_an_object_or_malformed(data: bytes) -> None:
    for parse in (parse_json, parse_msgpack):
        with suppress(MalformedMessage, UnicodeDecodeError):
            assert isinstance(parse(data), dict)


@given(st.binary())
def test_payloads_come_back(payload: bytes) -> None:
    wire = {"type": "data", "s": "A" * ID_CHARACTERS}
    for read in (parse_json(encode_json(wire, payload)), parse_msgpack(encode_msgpack(wire, payload))):
        frame = read_broker_frame(read)
        assert isinstance(frame, Data)
        assert frame.payload == payload


def test_payloads_are_text_where_they_can_be() -> None:
    assert encode_json({"s": "é"}, "ü".encode()) == '{"s":"é","d":"ü"}'.encode()
    assert encode_json({}, b"\xff") == b'{"b":"/w=="}'
    assert parse_msgpack(encode_msgpack({}, b"x")) == {"d": "x"}
    assert parse_msgpack(encode_msgpack({}, b"\xff")) == {"b": b"\xff"}


@pytest.mark.parametrize("payload", [{}, {"d": 1}, {"b": "%"}, {"b": "é"}, {"d": b"x"}, {"d": "x", "b": "eA=="}])
def test_refuses_payloads(payload: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        read_user_frame({"type": "publish", "ref": 1, "channel": "news"} | payload)


def test_encodings_are_made_once() -> None:
    prepared = prepare({"type": "data"}, b"x")
    assert prepared.websocket_json is prepared.websocket_json
    assert prepared.websocket_msgpack is prepared.websocket_msgpack
    assert prepared.sse is prepared.sse
    assert prepared.websocket_json == b'\x81\x17{"type":"data","d":"x"}'
    assert prepared.sse == b'data: {"type":"data","d":"x"}\n'
