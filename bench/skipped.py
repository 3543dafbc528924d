"""How a benchmark says that it cannot run here."""

STATUS = 77
"""The exit status of a benchmark that has measured nothing and has written why to stderr. As in automake."""
