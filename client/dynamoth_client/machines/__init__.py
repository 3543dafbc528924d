"""Decides everything that the client does. Pure: no I/O, no clock, no randomness."""
