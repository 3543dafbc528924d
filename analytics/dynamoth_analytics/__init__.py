"""Spark jobs over recordings: ``dynamoth report`` and ``dynamoth what-if``."""
