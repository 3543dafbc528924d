"""``dynamoth demo-brokers``: end users on edge brokers that are drained and killed, under audit."""
