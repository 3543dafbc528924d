"""Adds servers under load and frees them afterwards."""
