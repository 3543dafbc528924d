"""Runs the balancer as a process. All other modules of the balancer are pure."""
