"""Defaults that the links of clients (``dynamoth_link.options``) and of daemons (``sections.LinkSettings``) share."""

CONNECT_TIMEOUT_S = 5.0
PING_INTERVAL_S = 1.5
PING_TIMEOUT_S = 3.4
"""A cut connection is found within 4.95 s, and a command that blocks the server for 3 s is not taken for one."""
