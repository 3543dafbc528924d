"""A result set: the payload of one publication in the log of a query's interest.

It is JSON, so that end users read it without us: ``{"query": "near", "version": 1, "execution": 12, "until": "...",
"rows": [{...}, ...]}``. A result set that is too large has ``error`` in place of ``rows``; the last publication of a
query that was dropped has ``dropped``, and that of an interest that does not fit a changed query ``error``.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache


def result_payload(query: str, version: int, execution: int, until_ms: int, rows_json: str) -> bytes:
    """Return the payload of a result set; ``rows_json`` is a JSON array of objects."""
    return (_head(query, version, execution, until_ms) + f',"rows":{rows_json}}}').encode()


def too_large_payload(
    query: str, version: int, execution: int, until_ms: int, rows: int, size: int, size_max: int
) -> bytes:
    """Return the payload that replaces a result set that has more bytes than the query allows."""
    error = f"the result set has {rows} rows and at least {size} bytes, and result_bytes_max of the query is {size_max}"
    return (_head(query, version, execution, until_ms) + f',"error":{json.dumps(error)}}}').encode()


def dropped_payload(query: str, version: int, execution: int, until_ms: int) -> bytes:
    """Return the last publication of a query that was dropped."""
    return (_head(query, version, execution, until_ms) + ',"dropped":true}').encode()


def changed_payload(query: str, version: int, execution: int, until_ms: int, reason: str) -> bytes:
    """Return the last publication of an interest that does not fit a query any more, as that has changed."""
    error = json.dumps(f"the query has changed: subscribe again: {reason}")
    return (_head(query, version, execution, until_ms) + f',"error":{error}}}').encode()


def says_the_same(one: bytes, other: bytes) -> bool:
    """Return whether two publications differ in nothing but their execution and its time."""
    found = [json.loads(each) for each in (one, other)]
    for each in found:
        each.pop("execution", None)
        each.pop("until", None)
    return bool(found[0] == found[1])


@lru_cache(maxsize=64)
def _head(query: str, version: int, execution: int, until_ms: int) -> str:
    until = datetime.fromtimestamp(until_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f'{{"query":{json.dumps(query)},"version":{version},"execution":{execution},"until":"{until}"'
