"""Links to Redis servers, and the driver that runs machines on them."""
