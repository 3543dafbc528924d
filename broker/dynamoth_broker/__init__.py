"""Edge brokers: they serve end users, and share what users subscribe to alike (BAD)."""
