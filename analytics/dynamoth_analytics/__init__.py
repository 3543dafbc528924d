"""Spark jobs over recorded metrics."""
