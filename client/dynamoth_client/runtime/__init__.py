"""Runs the client's machines on an event loop: connections, futures and queues."""
