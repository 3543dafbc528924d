"""How a benchmark ends that has measured nothing: it has written why to stderr."""

SKIPPED = 77
"""It cannot run here. As in automake."""

INTERRUPTED = 130
"""It was interrupted, and has removed what it made. As shells say."""
