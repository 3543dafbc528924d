"""The records in the body of a POST."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import MalformedMessage
from dynamoth_broker.process.posting import split_records

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.lists(VALUES, min_size=1, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_an_array_has_the_records_that_json_has(values: list[Any], indent: int | None, is_ascii: bool) -> None:
    body = json.dumps(values, indent=indent, ensure_ascii=is_ascii).encode(errors="replace")
    assert [json.loads(each) for each in split_records(body)] == json.loads(body)


def test_the_records_of_an_array_are_as_they_were_sent() -> None:
    """The dataset judges them: a key that is there twice must not get lost before."""
    assert split_records(b' [ {"a": 1, "a": 2} ,{"b": 1e2}\n] ') == [b'{"a": 1, "a": 2}', b'{"b": 1e2}']


@pytest.mark.parametrize(
    "body",
    [b"[", b"[1", b"[1,", b"[1,]", b"[,1]", b"[1 2]", b"[1]]", b"[1] [2]", b"[1],", b"[]", b"[ ]", b"[" * 50_000,
     b"[\xff]", '[{"a": 1}]'.encode("utf-16-le")],
)  # fmt: skip
def test_what_is_no_array_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        split_records(body)
