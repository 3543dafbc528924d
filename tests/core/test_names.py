"""Names under the reserved prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth import names
from dynamoth.globs import compile_glob, physical_patterns


@given(st.binary(max_size=20), st.integers(0, 2**32 - 1))
def test_a_replica_channel_says_its_users_name(channel: bytes, epoch: int) -> None:
    physical = names.replica_channel(channel, epoch)
    assert names.logical_channel(physical) == channel
    assert names.is_user_channel(physical)
    assert physical.startswith(names.RESERVED_PREFIX)


@given(st.binary(max_size=20), st.integers(0, 2**32 - 1))
def test_a_sharded_channel_is_an_application_s_and_no_pattern_sees_its_replicas(name: bytes, epoch: int) -> None:
    channel = names.sharded_channel(name)
    replica = names.replica_channel(channel, epoch)
    assert names.logical_channel(channel) == names.logical_channel(replica) == channel
    assert names.is_user_channel(channel) and names.is_user_channel(replica)
    assert not names.is_own_channel(channel)
    assert not compile_glob(names.replica_pattern(b"*")).fullmatch(replica)
    for pattern in physical_patterns(b"*"):
        assert not compile_glob(pattern).fullmatch(channel)
        assert not compile_glob(pattern).fullmatch(replica)


def test_the_replicas_of_a_channel_with_a_colon_are_not_those_of_what_is_behind_it() -> None:
    """An ACL rule for ``news.*`` must not cover the replicas of ``secret:news.x``."""
    rule = compile_glob(names.replica_pattern(b"news.*"))
    assert rule.fullmatch(names.replica_channel(b"news.x", 5))
    assert not rule.fullmatch(names.replica_channel(b"secret:news.x", 5))
    covered = b"__dynamoth__:r:5:secret:news.x"  # by the rule, so it must not be a replica of secret:news.x
    assert rule.fullmatch(covered) and names.logical_channel(covered) == b"news.x"


@given(st.binary(max_size=20), st.integers(0, 2**32 - 1))
def test_a_request_to_forward_names_a_replicated_channel(channel: bytes, epoch: int) -> None:
    for logical in (channel, names.sharded_channel(channel)):
        physical = names.replica_channel(logical, epoch)
        assert names.forwarded_channel(names.forward_channel(physical)) == physical
        assert not names.is_user_channel(names.forward_channel(physical))


@given(st.binary(max_size=20))
def test_nothing_else_can_be_asked_to_be_forwarded(name: bytes) -> None:
    assert names.forwarded_channel(names.FORWARD_PREFIX + b"s:" + name) is None
    assert names.forwarded_channel(names.FORWARD_PREFIX + b"inbox:" + name) is None
    assert names.forwarded_channel(names.FORWARD_PREFIX + b"agent:to-balancer") is None


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_every_client_has_an_inbox_of_its_own(one: int, other: int) -> None:
    assert (names.inbox(one) == names.inbox(other)) is (one == other)
    assert names.inbox(one).startswith(names.RESERVED_PREFIX)


@pytest.mark.parametrize("channel", [b"", b"news", b"__", b"__dynamoth__", b"__mine__:x", b"\xff\x00"])
def test_channels_of_users(channel: bytes) -> None:
    assert names.is_user_channel(channel)
    assert names.logical_channel(channel) == channel


@pytest.mark.parametrize(
    "channel",
    [
        names.AGENT_CHANNEL,
        names.BALANCER_CHANNEL,
        names.OPERATOR_CHANNEL,
        names.CLIENTS_CHANNEL,
        names.ANNOUNCE_CHANNEL,
        names.inbox(1),
        names.operator_inbox(1),
        names.relay_channel(b"c"),
        names.forward_channel(names.replica_channel(b"c", 1)),
        b"__dynamoth__:r:1:c",
        b"__dynamoth__:r:",
        b"__keyspace@0__:key",
        b"__keyevent@0__:expired",
        b"__redis__:invalidate",
    ],
)
def test_channels_that_are_never_measured_nor_forwarded(channel: bytes) -> None:
    assert not names.is_user_channel(channel)
    assert names.is_own_channel(channel) is channel.startswith(names.RESERVED_PREFIX)
