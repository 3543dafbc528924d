"""Counts time series, and names channels as somebody would who wants to have very many of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]
"""The name of a metric, and its labels with their values."""

_PREFIXES = (b'x"} 1\n', b"\\", b"\xff\xfe", b"{server=", b"# HELP ", b"", "\u2028".encode())


def hostile_channels(count: int) -> list[bytes]:
    """Return names that would break the text format, each once."""
    return [_PREFIXES[number % len(_PREFIXES)] + b"%d" % number for number in range(count)]


def series_of(registry: CollectorRegistry) -> set[Series]:
    """Return the series that a scrape finds, as its parser reads them."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(sample.name, frozenset(sample.labels.items())) for family in families for sample in family.samples}
