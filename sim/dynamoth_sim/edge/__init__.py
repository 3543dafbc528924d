"""What simulations of edge brokers need besides the production code."""
