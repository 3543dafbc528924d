"""The metrics of a data cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from prometheus_client.core import Metric

from dynamoth_analytics.cluster.metrics import collect, collect_ingest
from dynamoth_analytics.cluster.runner import ClusterRunner
from dynamoth_analytics.cluster.servers import read_servers
from dynamoth_daemon.metrics import make_registry
from tests.compose.files import ALERTS
from tests.compose.metric_series import series_of


def test_alerts_ask_for_metrics_that_there_are(tmp_path: Path) -> None:
    no_spark = cast("Any", None)  # it has not begun, and executes nothing
    runner = ClusterRunner(no_spark, read_servers("l1=redis://127.0.0.1:1"), "dynamoth://127.0.0.1:1", tmp_path, 60.0)

    def collected() -> Iterator[Metric]:
        yield from collect(runner)
        yield from collect_ingest(Counter(), 0)

    names = {name for name, _ in series_of(make_registry("data_cluster", collected))}
    asked = {name for alert in ALERTS for name in re.findall(r"\bdynamoth_data_cluster_\w+", alert["expr"])}
    assert asked and asked <= names
