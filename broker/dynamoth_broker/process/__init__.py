"""Runs the edge broker as a process: transports, timers and sockets. All other modules of the broker are pure."""
