"""What the data cluster stores in its folder, and how records are read from there and from Redis."""
