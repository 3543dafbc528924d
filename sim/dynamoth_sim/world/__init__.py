"""The simulated world: time, network, Redis servers and processes."""
