"""``dynamoth demo-emergency``: the emergency application on a whole data cluster, while processes are killed."""
