"""10,000 clients lose a server at the same moment: they do not connect to the others at the same moment."""

from __future__ import annotations

from collections import Counter
from random import Random

from dynamoth.machine.events import Connect, LinkDown, LinkUp, Replied, Send, Start, Tick
from dynamoth.plan.plan import Plan, Server, single
from dynamoth_client.machines.local_plan import LocalPlan
from dynamoth_client.machines.subscriber.events import Subscribe, SubscriberAction, SubscriberOptions
from dynamoth_client.machines.subscriber.machine import SubscriberMachine
from tests.machines.helpers import RUN, entry_reply

CLIENTS = 10_000
SERVERS = [f"s{number}" for number in range(1, 6)]
BEFORE = Plan.initial([Server(id_, f"redis://{id_}") for id_ in SERVERS], virtual_nodes=8)
CHANNELS = [name for name in map(b"c%d".__mod__, range(1000)) if BEFORE.ring.home(name) == "s1"][:100]
AFTER = {
    channel: BEFORE.begin({channel: single(SERVERS[1 + number % 4])}).activate([channel]).settle([channel])
    for number, channel in enumerate(CHANNELS)
}

LOST_AT = 100.0
TAKEN_OVER_AT = LOST_AT + 1.6
"""When others have the channels: earlier than with usual settings, to save questions in vain."""
ENDS_AT = LOST_AT + 3.2

PER_S_MAX = 1.2 * CLIENTS
"""Each client connects once to ask and once to listen; each of both is spread over a second."""
BUCKET_S = 0.1


class Client:
    """A subscriber to one channel at s1, and when it connects to other servers."""

    def __init__(self, client_id: int, channel: bytes) -> None:
        self.channel = channel
        self.machine = SubscriberMachine(client_id, LocalPlan(BEFORE), SubscriberOptions())
        self.now = LOST_AT - 10.0
        #: Times of connections, and the servers.
        self.connects: list[tuple[float, str]] = []
        self._do(self.machine.handle(Start(), self.now))
        self._do(self.machine.handle(Subscribe((channel,)), self.now))
        self._run_until(LOST_AT)

    def lose(self) -> None:
        """Lose s1, and go on until the end."""
        self.connects.clear()
        self._do(self.machine.handle(LinkDown("s1", "the server has died"), self.now))
        self._run_until(ENDS_AT)

    def _run_until(self, end: float) -> None:
        while (deadline := self.machine.deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self._do(self.machine.handle(Tick(), self.now))
        self.now = end

    def _do(self, actions: list[SubscriberAction]) -> None:
        for action in actions:
            match action:
                case Connect(link, url):
                    self.connects.append((self.now, url.removeprefix("redis://")))
                    self._do(self.machine.handle(LinkUp(link, RUN), self.now))
                case Send(link, _, tag) if tag and tag[0] in ("elsewhere", "verify"):
                    stored = BEFORE if self.now < TAKEN_OVER_AT else AFTER[self.channel]
                    self._do(self.machine.handle(Replied(link, tag, entry_reply(stored, self.channel)), self.now))
                case _:
                    pass


def test_10000_clients_of_a_dead_server_connect_to_others_one_after_the_other() -> None:
    random = Random(15)
    buckets: Counter[int] = Counter()
    by_server: Counter[tuple[int, str]] = Counter()
    for number in range(CLIENTS):
        client = Client(random.getrandbits(64), CHANNELS[number % len(CHANNELS)])
        client.lose()
        [new] = AFTER[client.channel].entry(client.channel).route.assignment.servers
        assert new in {server for _, server in client.connects}, "it has found the new server"
        assert client.connects[-1][0] <= TAKEN_OVER_AT + 1.5, "and soon"
        for at, server in client.connects:
            buckets[int(at / BUCKET_S)] += 1
            by_server[int(at / BUCKET_S), server] += 1
    assert max(buckets.values()) <= PER_S_MAX * BUCKET_S
    assert max(by_server.values()) <= 1.5 * PER_S_MAX * BUCKET_S / (len(SERVERS) - 1)
