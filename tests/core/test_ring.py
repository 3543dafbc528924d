"""The ring: everybody computes the same home, and a new server takes only its share."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamoth.plan.ring import VIRTUAL_NODES, Ring

CHANNELS = [b"channel-%d" % number for number in range(4000)]
SHARE_DEVIATION_RATIO_MAX = 0.35
"""Of a server's share from 1/N. VIRTUAL_NODES = 256 gives a standard deviation of 6%; 4000 channels on 10 servers add
5%."""

GOLDEN_HOMES = {b"": "alpha", b"news": "alpha", b"tile:3:7": "alpha", b"\x00\xff": "gamma", "größe".encode(): "beta"}
GOLDEN_SHARES = {"alpha": 1249, "beta": 1427, "gamma": 1324}


def test_homes_never_change_silently() -> None:
    """A client of today and an agent of next year must agree: another hash is a new wire version."""
    ring = Ring(["alpha", "beta", "gamma"])
    assert {name: ring.home(name) for name in GOLDEN_HOMES} == GOLDEN_HOMES
    assert Counter(map(ring.home, CHANNELS)) == GOLDEN_SHARES


def test_order_of_servers_does_not_matter() -> None:
    one, other = Ring(["a", "b", "c"]), Ring(["c", "a", "b"])
    assert one.servers == other.servers == ("a", "b", "c")
    assert [one.home(name) for name in CHANNELS] == [other.home(name) for name in CHANNELS]


@settings(max_examples=15)
@given(st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=8), st.text(min_size=7, max_size=8))
def test_adding_a_server_moves_its_share_and_only_to_it(servers: set[str], new: str) -> None:
    before, after = Ring(servers), Ring({*servers, new})
    moved = [name for name in CHANNELS if before.home(name) != after.home(name)]
    assert {after.home(name) for name in moved} == {new}
    expected = len(CHANNELS) / (len(servers) + 1)
    assert abs(len(moved) - expected) <= SHARE_DEVIATION_RATIO_MAX * expected


@settings(max_examples=15)
@given(st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=10))
def test_every_server_gets_about_the_same_share(servers: set[str]) -> None:
    shares = Counter(map(Ring(servers).home, CHANNELS))
    expected = len(CHANNELS) / len(servers)
    for server in servers:
        assert abs(shares[server] - expected) <= SHARE_DEVIATION_RATIO_MAX * expected


def test_virtual_nodes_are_what_spreads_the_load() -> None:
    def spread(virtual_nodes: int) -> int:
        shares = Counter(map(Ring(["a", "b", "c", "d"], virtual_nodes).home, CHANNELS))
        return max(shares.values()) - min(shares.values())

    spreads = [spread(nodes) for nodes in (1, 16, VIRTUAL_NODES)]
    assert all(few > many for few, many in pairwise(spreads))


@pytest.mark.parametrize(
    ("servers", "nodes", "cause"),
    [((), 1, "at least one server"), (("a", "a"), 1, "twice"), (("a",), 0, "virtual"), (("a",), -1, "virtual")],
)
def test_refuses_what_makes_no_ring(servers: tuple[str, ...], nodes: int, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        Ring(servers, nodes)
