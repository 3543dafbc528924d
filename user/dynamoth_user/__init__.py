"""The end user's client of Dynamoth's edge brokers."""
