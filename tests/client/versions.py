"""The redis-py that is installed: `make oldest` runs these tests with the oldest that is supported."""

from __future__ import annotations

import redis

REDIS_PY = tuple(int(part) for part in redis.__version__.split(".")[:2])
"""Its version; what is expected here of older ones is theirs, not ours."""
