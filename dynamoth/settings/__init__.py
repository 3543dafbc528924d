"""The settings of every process, each declared once."""
