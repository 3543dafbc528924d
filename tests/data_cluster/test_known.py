"""Queries whose definitions are gone without being dropped."""

from __future__ import annotations

import pytest

from dynamoth.data.catalog import Catalog
from dynamoth.data.queries import StandingQuery
from dynamoth_analytics.cluster.known import DefinitionsLost, KnownQueries

NEAR = StandingQuery("near", "...", "reports", 1, ())


def test_definitions_that_all_servers_have_lost_are_named_until_they_are_back_or_dropped() -> None:
    known = KnownQueries()
    known.check(Catalog())
    known.check(Catalog(queries={"near": NEAR, "far": NEAR}))
    for _ in range(2):
        with pytest.raises(DefinitionsLost, match="query set FILE`\\): far, near"):
            known.check(Catalog())
    with pytest.raises(DefinitionsLost, match=r": far$"):
        known.check(Catalog(queries={"near": NEAR}))
    known.check(Catalog(queries={"near": NEAR}, dropped_queries={"far": 2}))
    known.check(Catalog(query_faults={"near": "it cannot be read"}, dropped_queries={"far": 2}))
