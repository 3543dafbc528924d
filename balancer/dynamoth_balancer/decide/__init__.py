"""Decides which server carries which channel: the model of the load, and the goals."""
