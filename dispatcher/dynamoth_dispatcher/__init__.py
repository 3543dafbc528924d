"""Forwarding and redirection at one server while channels move."""
