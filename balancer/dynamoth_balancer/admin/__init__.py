"""Answers operators: changes, compatibility rules, status and problems."""
