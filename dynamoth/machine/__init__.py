"""What every machine is made of: its events and actions, timers, and an outbox for commands that must arrive."""
