"""The shared parts of the daemons: process, HTTP, logs, metrics, event loop and exit codes."""
