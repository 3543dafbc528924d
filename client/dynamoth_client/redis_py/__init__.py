"""Fits the client to redis-py: its arguments, pools, errors and module names."""
