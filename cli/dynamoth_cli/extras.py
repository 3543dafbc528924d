"""The extras of the distribution, and whether they are installed."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "agent": ("prometheus_client",),
    "balancer": ("prometheus_client",),
    "cli": ("prometheus_client", "rich"),
    "broker": ("aiohttp", "cryptography", "jwt", "prometheus_client", "websockets"),
    "demo": ("aiohttp", "cryptography", "jwt", "prometheus_client", "rich", "websockets"),
    "emergency": (
        "aiohttp",
        "cryptography",
        "jwt",
        "pandas",
        "prometheus_client",
        "pyarrow",
        "pyspark",
        "rich",
        "sqlglot",
        "websockets",
    ),
    "record": ("prometheus_client", "pyarrow"),
    "analytics": ("pandas", "pyarrow", "pyspark"),
}
"""The packages that an extra brings and that a command cannot do without."""


def what_is_missing(extra: str) -> str | None:
    """Return a package of an extra that is not installed, and how to install it; None where all are."""
    missing = next((package for package in EXTRAS[extra] if find_spec(package) is None), None)
    return missing and f"{missing}: install the extra {extra!r} (pip install '.[{extra}]' in a checkout)"
