"""The coordinator of edge brokers decides which broker serves which user: placement, relief and shuffles (BAD)."""
