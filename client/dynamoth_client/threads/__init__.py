"""Lets threads share one event loop: the base of the synchronous client."""
