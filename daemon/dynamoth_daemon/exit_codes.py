"""The exit codes of the command ``dynamoth``, and so of the daemons."""

EXIT_DONE = 0
"""Success; for a daemon: it was stopped by SIGTERM or SIGINT."""

EXIT_FAILED = 1
"""Failure or refusal, a check that found something, or a daemon that ended because of a bug."""

EXIT_REFUSED = 2
"""The command line or the configuration is wrong, or another daemon is at work: starting it again does not help."""

EXIT_INTERRUPTED = 130
"""Interrupted before it was done: 128 + SIGINT, as shells have it."""

EXIT_CODES = (
    "exit codes: 0 done; 1 failed or refused; 2 wrong command line or configuration, or another daemon is at work"
    " already; 130 interrupted"
)
