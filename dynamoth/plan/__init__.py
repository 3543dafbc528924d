"""The plan: which server carries which channel."""
