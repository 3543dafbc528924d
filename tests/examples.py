"""How many examples a property is tried with."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(count: int, **options: Any) -> settings:
    """Return settings for more examples than usual, and for as many as all others have where those are more (soak)."""
    return settings(max_examples=max(count, settings().max_examples), **options)
