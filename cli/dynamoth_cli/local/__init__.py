"""Starts servers and whole clusters as processes on this machine."""
