"""Benchmarks against real Redis servers."""
