"""Replays recorded loads of edge brokers through the coordinator that runs in production."""
