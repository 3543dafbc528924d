"""Simulated edge brokers and end users, on top of a simulated cluster."""
