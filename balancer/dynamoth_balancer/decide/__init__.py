"""Decides which server carries which channel: the load model, and goals (Algorithm 1 is replicate, 2 is relieve)."""
