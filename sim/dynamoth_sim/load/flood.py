"""A flood: for some time, more is published at a server than its agent reads."""

from __future__ import annotations

from dynamoth.names import INBOX_PREFIX
from dynamoth_sim.cluster import Cluster
from dynamoth_sim.world.redis import OUTPUT_BUFFER_BYTES_MAX

CHANNEL = INBOX_PREFIX + b"nobody"
"""The flooded channel. Only agents receive it."""

MESSAGE = b"x" * 2000
INTERVAL_S = 0.004
READ_BYTES_PER_S = 100_000.0
"""The agent's reading rate: a fifth of the flood. Earlier messages are read at once."""

BUFFER_BYTES = 60_000
"""The output buffer of a connection at the server: a sixth of a second of the flood."""


class Flood:
    """Publishes at one server, whose agent reads slowly, from :meth:`start` until :meth:`stop`."""

    def __init__(self, cluster: Cluster, server: str) -> None:
        self._world = cluster.world
        self._network = cluster.network
        self._server = cluster.servers[server]
        self._agent = cluster.agents[server]
        self._stopped = False

    def start(self) -> None:
        """Start the flood."""
        self._note("much is published here")
        self._read_on = self._network.slow_down(self._agent.name, self._server.id, READ_BYTES_PER_S)
        self._server.output_buffer_bytes_max = BUFFER_BYTES
        self._publish()

    def stop(self) -> None:
        """End: the agent reads as before, and the server has its usual buffers."""
        self._note("no more is published here")
        self._stopped = True
        self._read_on()
        self._server.output_buffer_bytes_max = OUTPUT_BUFFER_BYTES_MAX

    def _publish(self) -> None:
        if self._stopped:
            return
        if self._server.up:
            self._server.inject(CHANNEL, MESSAGE)
        self._world.after(INTERVAL_S, self._publish)

    def _note(self, text: str) -> None:
        self._world.trace.add((self._world.now, "fault", None, self._server.id, None, None, text))
