"""The data cluster in the simulator: a model of it, users of standing queries, and an audit of what they get."""
