"""What the daemons share: their event loop, signals, logs and HTTP."""
