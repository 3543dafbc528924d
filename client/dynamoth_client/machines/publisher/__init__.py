"""Decides where messages are published, and what `publish` returns."""
