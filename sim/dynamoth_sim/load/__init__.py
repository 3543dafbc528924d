"""What simulated applications and operators do."""
