"""Replays a recorded load through the production balancer: the grid of settings, windows, replays, and comparisons."""
