"""Decides where channels are subscribed to, and which messages are delivered."""
