"""The load balancer: decisions, plan distribution and the servers' life."""
