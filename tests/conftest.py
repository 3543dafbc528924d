"""What every test can use."""

from __future__ import annotations

import os

from hypothesis import settings

from tests.redis_servers import free_port, redis_server, redis_server_factory

__all__ = ["free_port", "redis_server", "redis_server_factory"]

# No deadline: other work on the machine must not fail a test. In CI the same examples every time; many more
# of them in `make soak`. A failure prints the blob that replays it.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "local")
