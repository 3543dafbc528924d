"""The drop-in client: redis-py's pub/sub over many servers."""
