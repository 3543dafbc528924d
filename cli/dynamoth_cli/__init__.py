"""The one command, dynamoth."""
