"""The simulator: virtual time, network and Redis, driving the machines of production."""
