"""Compiles the SQL of a standing query for all of its interests at once; knows nothing of servers and records."""
