"""Installs plans at the servers: the lease, the takeover, the copies and the phases of each change."""
