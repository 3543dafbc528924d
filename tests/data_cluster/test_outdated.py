"""Interests that do not fit a changed query get one last result set, whatever dies, on real Redis servers."""

from __future__ import annotations

from typing import Any

import pytest

from dynamoth.data.queries import StandingQuery
from dynamoth.edge.log import log_keys
from dynamoth_analytics.cluster import outdated
from dynamoth_analytics.cluster.interest_table import InterestTable
from dynamoth_analytics.cluster.outdated import OutdatedInterests
from dynamoth_analytics.cluster.publishing import ResultPublisher
from tests.data_cluster.world import World

CHANGED: dict[str, Any] = {
    "parameters": {"type": "string", "least": "int"},
    "sql": "SELECT r.id FROM reports r WHERE r.type = :type AND r.size >= :least",
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers know each definition at once."""
    monkeypatch.setattr(outdated, "BROKERS_KNOW_S", 0.0)


class Cluster:
    """What a data cluster does with one version of a query."""

    def __init__(self, world: World, query: StandingQuery) -> None:
        self.world, self.query = world, query
        self.table = InterestTable(world.servers, world.folder / "interests" / query.name, query)
        self.outdated = OutdatedInterests()

    def execute(self, execution: int) -> None:
        self.table.refresh()
        world, query = self.world, self.query
        publisher = ResultPublisher(
            world.servers, world.cluster_url, query.name, query.version, execution, 0, 1, 1000, 1000, 10, 60.0
        )
        self.outdated.end(publisher, self.table)


def error(version: int, execution: int, reason: str) -> dict[str, Any]:
    return {
        "query": "of_type", "version": version, "execution": execution, "until": "1970-01-01T00:00:00.000Z",
        "error": f"the query has changed: subscribe again: {reason}",
    }  # fmt: skip


LEAST = "parameter 'least' is missing: it is of type int"


def test_an_interest_that_does_not_fit_any_more_is_ended_once(world: World) -> None:
    old = world.register("of_type", {"type": "fire"})
    good = world.register("of_type", {"type": "fire", "least": 1})
    first = Cluster(world, world.set_query(version=2, **CHANGED))
    first.execute(7)
    assert world.log(old) == [error(2, 7, LEAST)]
    for cluster, execution in ((first, 7), (first, 8), (Cluster(world, first.query), 8), (first, 9)):
        cluster.execute(execution)
    assert world.log(old) == [error(2, 7, LEAST)], "also by a data cluster that has begun again"
    late = world.register("of_type", {"type": "flood"})
    first.execute(10)
    assert world.log(late) == [error(2, 10, LEAST)]
    assert not world.log(good)


def test_a_log_that_was_lost_says_so_again(world: World) -> None:
    old = world.register("of_type", {"type": "fire"})
    query = world.set_query(version=2, **CHANGED)
    Cluster(world, query).execute(7)
    world.servers.run(world.server_of(old), (b"DEL", *log_keys(old)))
    Cluster(world, query).execute(8)
    assert world.log(old) == [error(2, 8, LEAST)]


def test_another_change_is_another_error_and_one_that_fits_is_executed_again(world: World) -> None:
    old = world.register("of_type", {"type": "fire"})
    Cluster(world, world.set_query(version=2, **CHANGED)).execute(7)
    narrow = {"type": {"type": "string", "choices": ["flood"]}}
    Cluster(world, world.set_query(version=3, parameters=narrow)).execute(8)
    assert world.log(old) == [error(2, 7, LEAST), error(3, 8, "parameter 'type' is one of flood, not 'fire'")]
    last = Cluster(world, world.set_query(version=4))
    last.execute(9)
    assert len(world.log(old)) == 2
    assert last.table.unfit() == {}


def test_interests_that_fit_a_newer_version_are_not_ended(world: World) -> None:
    cluster = Cluster(world, world.set_query(version=2, **CHANGED))
    world.set_query(version=3)
    new = world.register("of_type", {"type": "fire"})
    cluster.execute(7)
    assert not world.log(new)


def test_nothing_is_published_before_brokers_know(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old = world.register("of_type", {"type": "fire"})
    cluster = Cluster(world, world.set_query(version=2, **CHANGED))
    monkeypatch.setattr(outdated, "BROKERS_KNOW_S", 3600.0)
    cluster.execute(7)
    assert not world.log(old)
    monkeypatch.setattr(outdated, "BROKERS_KNOW_S", 0.0)
    cluster.execute(8)
    assert world.log(old) == [error(2, 8, LEAST)]
