"""`dynamoth demo`: a game on a cluster of its own, with an audit of every message."""
