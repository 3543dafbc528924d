"""Decides where patterns are subscribed to, and which messages are delivered."""
