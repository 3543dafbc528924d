"""The benchmark of replication: what it counts as held, and that nothing of its networks is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.replication import EXPERIMENTS, RESPONSE_MS_MAX, Ladder, Outcome, table
from bench.replication_clients import Clients, Step
from bench.replication_network import LimitedCluster, Network, NotPossible, check_possible

GOOD = Step(
    subscribers=100,
    publishers=1,
    published=40,
    publish_failed=0,
    due=4000,
    delivered=4000,
    lost_reported=0,
    lost_silently=0,
    duplicated=0,
    reordered=0,
    response_ms_p50=10.0,
    response_ms_p99=20.0,
    busy_ratio=0.1,
)


def ladder(servers: int, *held: tuple[int, bool]) -> Ladder:
    steps = {count: replace(GOOD, response_ms_p99=20.0 if good else 500.0) for count, good in held}
    return Ladder(servers, steps, (), 0)


@pytest.mark.parametrize(
    "step",
    [
        replace(GOOD, response_ms_p99=151.0),
        replace(GOOD, delivered=3999, lost_silently=1),
        replace(GOOD, delivered=3999, lost_reported=1),
        replace(GOOD, delivered=4000, lost_reported=1, duplicated=1),
        replace(GOOD, reordered=1),
        replace(GOOD, publish_failed=1),
        replace(GOOD, delivered=0, response_ms_p50=None, response_ms_p99=None),
    ],
)
def test_a_step_holds_when_everything_is_delivered_as_it_should_be_and_in_time(step: Step) -> None:
    assert GOOD.held(RESPONSE_MS_MAX)
    assert not step.held(RESPONSE_MS_MAX)


def test_the_ratio_is_of_what_is_held() -> None:
    one, three = ladder(1, (100, True), (200, False)), ladder(3, (100, True), (200, True), (300, True))
    outcome = Outcome(EXPERIMENTS[0], one, three)
    assert outcome.ratio == 3.0
    assert Outcome(EXPERIMENTS[0], ladder(1, (100, False)), three).ratio == 0.0
    assert any("100 and 300, 3.00x" in line for line in table(outcome))


def test_the_error_for_users_other_than_root_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        check_possible()
    except NotPossible as error:
        assert "root" in str(error) or "install" in str(error)
    else:
        pytest.fail("it would have begun")


@pytest.fixture
def network() -> Iterator[Network]:
    """Two megabytes per second; skipped where networks cannot be made."""
    try:
        with Network(2_000_000) as network:
            network.add("probe")
            yield network
    except NotPossible as error:
        pytest.skip(str(error))


def test_a_limited_server_holds_so_much_and_leaves_nothing(network: Network) -> None:
    with LimitedCluster(network, 2) as cluster, Clients(cluster.url, b"hot", 1000, (1, 1)) as clients:
        clients.grow(20, 1)
        step = clients.step(1.0)
        assert step.held(10_000.0), step
        assert step.due == 20 * step.published > 0
        clients.grow(20, 30)
        step = clients.step(1.0)  # 6 MB in a second
        assert not step.held(1000.0), step
        assert step.response_ms_p99 is not None and step.response_ms_p99 > 1000
        assert step.lost_silently == 0
    assert network.addresses
    network.__exit__(None, None, None)
    left = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert f"dyb{os.getpid()}" not in left
    assert not list(Path("/run/netns").glob(f"dyb{os.getpid()}-*"))
