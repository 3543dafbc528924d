"""Makes the metrics of a daemon: families with one prefix and one set of labels, and the registry of its process.

A collector reads its daemon at each scrape, so no number is kept twice. Labels name servers and kinds of problems only,
never channels: the number of series of a daemon depends on the number of servers, not on the traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Families:
    """Makes metric families that begin with ``prefix`` and have the same labels.

    Args:
        prefix: of all names, ending with an underscore.
        labels: of each family's one sample.

    """

    def __init__(self, prefix: str, labels: Mapping[str, str] | None = None) -> None:
        self._prefix = prefix
        self._names = list(labels or {})
        self._values = list((labels or {}).values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge."""
        family = GaugeMetricFamily(self._prefix + name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def gauge_by(self, label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
        """Return a gauge with one sample for each value of one more label."""
        family = GaugeMetricFamily(self._prefix + name, text, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Return a counter; Prometheus sees its name with ``_total``."""
        family = CounterMetricFamily(self._prefix + name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def counters(self, texts: Mapping[str, str], values: Mapping[str, int], owner: str = "") -> Iterator[Metric]:
        """Yield a counter for each key of either mapping; one without a value is 0.

        ``owner`` comes between prefix and key.
        """
        for name in {**texts, **values}:
            yield self.counter(owner + name, texts.get(name, name.replace("_", " ")), values.get(name, 0))


class _Collector(Collector):
    """Hands the families of a function to a registry."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> list[Metric]:
        """Return nothing: some families appear only later, so names cannot be checked at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        return self._collect()


def make_registry(component: str, collect: Callable[[], Iterator[Metric]]) -> CollectorRegistry:
    """Return a registry of ``dynamoth_build_info``, the families that ``collect`` yields, and those of the process."""
    registry = CollectorRegistry()
    Info("dynamoth_build", "What is running", registry=registry).info({"version": _version(), "component": component})
    registry.register(_Collector(collect))
    ProcessCollector(registry=registry)
    return registry


def _version() -> str:
    try:
        return version("dynamoth")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
