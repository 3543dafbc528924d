"""Sentences, pictures and the page of a report."""
