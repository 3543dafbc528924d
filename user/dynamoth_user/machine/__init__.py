"""Decides what an end user's client does; no I/O, no clock, no randomness."""
