"""A split between two data centres, on real networks: each server is a machine of its own, and a cable is pulled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.replication_network import LimitedCluster, Network, NotPossible
from tests.whole.harness import channels_at, logged, until
from tests.whole.programs import How, Programs

SHORTER = {"balancer.server_dead_s": 1.5, "balancer.load_ratio_high": 100.0}

SPLIT_S_MAX = 120.0
"""A publish at a server on the other side fails after the client's own timeout, or waits for the end of the split."""


@pytest.fixture
def network() -> Iterator[Network]:
    """Ten megabytes per second; skipped where networks cannot be made."""
    try:
        with Network(10_000_000) as network:
            yield network
    except NotPossible as error:
        pytest.skip(str(error))


def test_both_sides_of_a_split_go_on_and_learn_what_they_have_missed(network: Network) -> None:
    """In the west there are s1 and the balancer, in the east s2, s3 and a standby; clients are on both sides."""
    [here], [there] = channels_at("s1", 1, servers=3), channels_at("s2", 1, servers=3)
    with LimitedCluster(network, 3, settings=SHORTER, paused=False) as cluster:
        east = cluster.balancer
        west = cluster.run("the balancer in the west", network.inside("s1", cluster.daemon("balancer")))
        until(lambda: logged(west, "waiting for the lease"), "it stands by")
        east.stop()
        until(lambda: logged(west, "leading"), "it leads")
        east.start()
        until(lambda: logged(east, "waiting for the lease"), "the one in the east stands by")
        programs = {"west": How(before=network.inside("s1", [])), "east": How()}
        with Programs(cluster.url, [here, there], programs, losses_allowed=True, publish_s_max=SPLIT_S_MAX) as clients:
            network.cut("s1")
            until(lambda: logged(east, "leading"), "the balancer in the east leads")
            assert logged(west, "lost the lease")
            clients.flow(["east"])
            clients.flow(["west"], [here])
            network.mend("s1")
            until(lambda: not cluster.ask_balancer("status", {})["problems"], "all is well again", 0.1)
            clients.flow()
            clients.calm()
            clients.flow()
            totals = clients.finish()
    assert totals.covered_losses, "the other side has missed some, and knows"
    assert totals.lost == totals.duplicated == totals.reordered == 0
    assert len(logged(west, "leading")) == 1
