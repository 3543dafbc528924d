"""Runs the agent as a process. All other modules of the agent are pure."""
