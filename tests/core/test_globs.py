"""Redis' globs, compared with a real server; and the patterns that one is split into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from dynamoth.globs import SPLIT_MAX, compile_glob, patterns_without, physical_patterns
from dynamoth.names import NOTIFICATION_PREFIXES, RESERVED_PREFIX, logical_channel, replica_channel
from dynamoth_cli.local.embedded import EmbeddedRedis

LETTERS = (b"a", b"b", b"c", b"_", b":", b"]", b"^", b"-", b"\\", b"\xff", b"\x80", b"\n", b"\0", b"*")
PIECES = (*LETTERS, b"*", b"?", b"[", b"[", b"[ab]", b"[^_", b"a-c")

patterns = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map(b"".join)
names = st.lists(st.sampled_from(LETTERS), max_size=6).map(b"".join)
lengths = st.integers(0, len(RESERVED_PREFIX))
near_reserved = st.tuples(lengths, names).map(lambda drawn: RESERVED_PREFIX[: drawn[0]] + drawn[1])


class RealRedis:
    """Tells whether a real server takes a name for a match."""

    def __init__(self, port: int) -> None:
        client: Any = redis.Redis
        self._client = client(port=port)
        self._pubsub = self._client.pubsub()

    def matches(self, pattern: bytes, name: bytes) -> bool:
        self._pubsub.psubscribe(pattern)
        self._acknowledged("psubscribe")
        matched: bool = self._client.execute_command("PUBLISH", name, "x") == 1
        self._pubsub.punsubscribe(pattern)
        self._acknowledged("punsubscribe")
        return matched

    def _acknowledged(self, kind: str) -> None:
        message = None
        while message is None or message["type"] != kind:
            message = self._pubsub.get_message(timeout=5.0)
            assert message is not None, f"no {kind}"

    def close(self) -> None:
        self._pubsub.close()
        self._client.close()


@pytest.fixture(scope="module")
def real() -> Iterator[RealRedis]:
    with EmbeddedRedis() as server:
        real = RealRedis(server.port)
        yield real
        real.close()


@given(patterns, names)
@example(b"*", b"")
@example(b"**", b"")
@example(b"[]", b"]")
@example(b"[^]", b"a")
@example(b"[a-\xff]", b"\xff")
@example(b"[\xff-a]", b"b")
@example(b"[c-a]", b"b")
@example(b"[a", b"a")
@example(b"a\\", b"a\\")
@example(b"[a\\]]", b"]")
def test_a_name_matches_where_it_does_for_redis(real: RealRedis, pattern: bytes, name: bytes) -> None:
    assert (compile_glob(pattern).fullmatch(name) is not None) == real.matches(pattern, name)


@given(patterns, st.one_of(names, near_reserved))
@example(b"*", b"__dynamoth__")
@example(b"*", b"__dynamoth__:balancer:to-agent")
@example(b"[^a]_*", b"__x")
def test_the_parts_match_what_the_pattern_matches_but_for_reserved_names(pattern: bytes, name: bytes) -> None:
    *plain, replicas = physical_patterns(pattern)
    matches = compile_glob(pattern).fullmatch(name) is not None
    seen = any(compile_glob(part).fullmatch(name) for part in plain)
    if name.startswith(RESERVED_PREFIX):
        assert not seen or (len(plain) == 1 and matches)
    else:
        assert seen == matches
    if matches:
        physical = replica_channel(name, 77)
        assert compile_glob(replicas).fullmatch(physical) and logical_channel(physical) == name


@given(patterns, st.one_of(names, near_reserved))
def test_redis_understands_the_parts(real: RealRedis, pattern: bytes, name: bytes) -> None:
    for part in physical_patterns(pattern)[:5]:
        assert (compile_glob(part).fullmatch(name) is not None) == real.matches(part, name)


def cut(name: bytes) -> st.SearchStrategy[bytes]:
    """Return names that agree with ``name`` for a while."""
    return st.tuples(st.integers(0, len(name)), names).map(lambda drawn: name[: drawn[0]] + drawn[1])


near_notifications = st.sampled_from((*NOTIFICATION_PREFIXES, RESERVED_PREFIX)).flatmap(cut)


@given(st.one_of(names, near_notifications).filter(bool))
@example(b"__key")
@example(b"__keyspace@0__:x")
@example(b"__keyevent@")
@example(b"__keyspacf@")
@example(b"__redis__:invalidate")
def test_everything_but_notifications_is_matched_by_exactly_one_pattern(real: RealRedis, name: bytes) -> None:
    parts = patterns_without(*NOTIFICATION_PREFIXES)
    matching = [part for part in parts if compile_glob(part).fullmatch(name)]
    assert len(matching) == (not name.startswith(NOTIFICATION_PREFIXES))
    assert all(real.matches(part, name) for part in matching)


def test_a_pattern_that_matches_no_reserved_name_is_left_alone() -> None:
    assert physical_patterns(b"news.*") == (b"news.*", b"__dynamoth__:r:????????:news.*")
    assert physical_patterns(b"_x[^a]\\*") == (b"_x[^a]\\*", b"__dynamoth__:r:????????:_x[^a]\\*")


def test_everything_is_split_by_how_far_names_agree_with_the_prefix() -> None:
    parts = physical_patterns(b"*")
    assert len(parts) == 2 * len(RESERVED_PREFIX)
    assert parts[:3] == (rb"[^\_]*", b"_", rb"_[^\_]*") and parts[-1] == b"__dynamoth__:r:????????:*"


def test_a_pattern_that_would_have_too_many_parts_is_not_split() -> None:
    pattern = b"*[^x]" * 9
    assert physical_patterns(pattern)[:-1] == (pattern,)
    assert len(physical_patterns(b"*?*?*")) <= SPLIT_MAX


def test_matching_takes_no_time_that_grows_with_the_number_of_stars() -> None:
    assert compile_glob(b"*a" * 30 + b"b").fullmatch(b"a" * 2000) is None
