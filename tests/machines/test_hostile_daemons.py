"""Whatever anybody publishes or stores, through the entry points of the daemons: no machine raises, and each goes on.

Each test gives a machine the whole corpus and then a real message, which must have its usual effect. There is no
hypothesis around these: it gives its tests a deeper stack than a daemon has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dynamoth.errors import MalformedMessage
from dynamoth.machine.events import LinkUp, Pushed, Replied, Send, Start
from dynamoth.names import (
    AGENT_CHANNEL,
    ANNOUNCE_CHANNEL,
    BALANCER_CHANNEL,
    CLIENTS_CHANNEL,
    FORWARD_PREFIX,
    OPERATOR_CHANNEL,
    PLAN_KEY,
    RELAY_PREFIX,
    REPLICA_PREFIX,
    forward_channel,
    operator_inbox,
    replica_channel,
)
from dynamoth.plan.plan import Plan, Server, single
from dynamoth.protocol import stored_plan
from dynamoth.protocol.control import AdminReply, AdminRequest, PlanChange, pack_control
from dynamoth.protocol.envelope import CONTROL, FIRST, seal
from dynamoth.protocol.plan_wire import unpack_entry
from dynamoth_agent.machine import AgentMachine
from dynamoth_balancer.install.leadership import Stage
from dynamoth_cli.admin import AdminMachine, Answered
from dynamoth_client.machines.subscriber.events import SubscriptionConfirmed
from dynamoth_lla.options import LoadAnalyzerOptions
from dynamoth_sim.world.invariants import Checker
from tests.balancer.cluster import NO_DECISIONS, SimCluster
from tests.core.hostile import corpus
from tests.machines.helpers import PLAN_0, C, channel_at, message, whole_reply
from tests.machines.listener import INBOX as LISTENER_INBOX
from tests.machines.listener import Listener, delivered
from tests.machines.publisher import INBOX, Publisher, numbers
from tests.machines.test_patterns import Matcher
from tests.machines.test_patterns import delivered as matched

BATCH = 50
OTHER = channel_at("s1", 2)


def batches(step: int = 1) -> Iterator[tuple[bytes, ...]]:
    """The corpus, or one of ``step`` parts of it, as reads of a connection bring it."""
    whole = corpus()[::step]
    return (whole[start : start + BATCH] for start in range(0, len(whole), BATCH))


# The balancer.


def test_a_balancer_survives_what_anybody_publishes_on_its_channel_with_the_lease_and_without() -> None:
    cluster = SimCluster(2)
    balancer, second = cluster.started(NO_DECISIONS), cluster.start(NO_DECISIONS)
    for batch in batches():
        for channel in (BALANCER_CHANNEL, OPERATOR_CHANNEL):
            for each in (balancer, second):
                each.process.handle(Pushed("s1", [[b"message", channel, data] for data in batch]))
    assert second.machine.stage is Stage.CONTENDING
    assert min(each.machine.counters["malformed"] for each in (balancer, second)) > 3000
    cluster.run(15)  # forged reports of a forged agent are over: the real one speaks
    assert balancer.machine.stage is Stage.LEADING
    home = balancer.plan.entry(b"real").route.assignment.servers[0]
    away = "s1" if home == "s2" else "s2"
    assert cluster.ask("move", {"channel": b"real", "to": away}, server="s2").error is None


@pytest.mark.parametrize("field", [stored_plan.VERSION_FIELD, stored_plan.HEADER_FIELD, stored_plan.RUN_FIELD, b"c:x"])
def test_a_balancer_starts_whatever_is_stored_at_a_server(field: bytes) -> None:
    """Every tenth of the corpus, as each takes a start."""
    for data in corpus()[:: len(corpus()) // 60]:
        cluster = SimCluster(2)
        cluster.kill(cluster.started(NO_DECISIONS))
        for server in cluster.servers.values():
            server.put(PLAN_KEY, {field: data}, keep=True)
        cluster.run(60)
        balancer = cluster.started(NO_DECISIONS)
        assert cluster.ask("status").error is None
        assert balancer.machine.stage is Stage.LEADING


# The agent.

PLAN = Plan.initial([Server("s1", "redis://h1"), Server("s2", "redis://h2")])
HERE = next(b"%d" % n for n in range(100) if PLAN.entry(b"%d" % n).route.assignment == single("s1"))
AWAY = next(b"%d" % n for n in range(100) if PLAN.entry(b"%d" % n).route.assignment == single("s2"))


class Agent:
    """An agent whose server answers what it must."""

    def __init__(self) -> None:
        self.machine = AgentMachine("s1", 5, None, LoadAnalyzerOptions(outgoing_bytes_per_s_max=1000), "redis://h1")
        self._checker = Checker(self.machine, every=1)
        self.now = 50.0
        self.tell(Start())
        self.tell(LinkUp("local", "run"))
        self.tell(Replied("local", ("guard", "count"), [AGENT_CHANNEL, 1]))

    def tell(self, event: Any) -> list[Any]:
        actions = self.machine.handle(event, self.now)
        self._checker.after(event)
        return actions

    def up(self, plan: Plan = PLAN) -> Agent:
        self.tell(Replied("local", ("plan",), whole_reply(plan, "run")))
        return self

    def push(self, channel: bytes, *datas: bytes) -> list[Any]:
        """Let messages be observed, and heard where the agent is subscribed by name."""
        pushes: list[list[Any]] = [[b"pmessage", b"*", channel, data] for data in datas]
        if channel == AGENT_CHANNEL:
            pushes += [[b"message", channel, data] for data in datas]
        return self.tell(Pushed("local", pushes))

    def check_at_work(self) -> None:
        """The agent follows the plan, and forwards."""
        plan = self.machine.dispatcher.plan
        assert plan is not None
        newer = plan.begin({b"real": single("s1" if plan.entry(b"real").route.assignment == single("s2") else "s2")})
        self.push(AGENT_CHANNEL, pack_control(PlanChange(plan.diff(newer))))
        assert self.machine.plan_version == newer.version
        before = self.machine.dispatcher.counters["forwarded_messages"]
        self.push(AWAY, seal(77, 1, 0, b"real"))
        assert self.machine.dispatcher.counters["forwarded_messages"] == before + 1


CHANNELS = {
    "agent": AGENT_CHANNEL,
    "announce": ANNOUNCE_CHANNEL,
    "forward": forward_channel(replica_channel(HERE, 1)),
    "relay": RELAY_PREFIX + HERE,
    "replica": replica_channel(HERE, 1),
    "broken replica": REPLICA_PREFIX,
    "broken forward": FORWARD_PREFIX,
    "broken relay": RELAY_PREFIX,
    "here": HERE,
    "away": AWAY,
    "empty": b"",
}
CONTROL_CHANNELS = {AGENT_CHANNEL, ANNOUNCE_CHANNEL, CHANNELS["forward"]}


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize("in_envelope", [False, True])
def test_an_agent_survives_what_anybody_publishes_anywhere(name: str, in_envelope: bool) -> None:
    channel = CHANNELS[name]
    moving = PLAN.begin({HERE: single("s2")}).activate([HERE])
    for plan in (None, PLAN, moving):
        agent = Agent() if plan is None else Agent().up(plan)
        for batch in batches(1 if plan is moving and channel in CONTROL_CHANNELS else 11):
            agent.push(channel, *(seal(1, 1, 0, data, CONTROL) if in_envelope else data for data in batch))
        if plan is None:
            agent.up()
        elif name == "agent" and not in_envelope:
            assert agent.machine.dispatcher.counters["malformed_messages"] > 300
            agent.up(Plan(10**6, plan.servers, plan.base))  # whatever it believes by now, what is stored counts
        agent.check_at_work()


def test_an_agent_survives_whatever_its_server_stores() -> None:
    agent = Agent().up()
    whole = whole_reply(PLAN, "run")
    for data in corpus()[::5]:
        for field in (stored_plan.VERSION_FIELD, stored_plan.HEADER_FIELD, stored_plan.RUN_FIELD, b"c:x"):
            agent.tell(Replied("local", ("plan",), {**whole, field: data}))
        agent.tell(Replied("local", ("plan",), data))
        agent.tell(Replied("local", ("plan",), [data]))
    assert agent.machine.dispatcher.counters["malformed_plans"] > 5_000
    assert agent.machine.plan_version == 0
    agent.check_at_work()


# Clients.


@pytest.mark.parametrize("in_envelope", [False, True])
@pytest.mark.parametrize("channel", [C, LISTENER_INBOX, replica_channel(C, 1)])
def test_a_subscriber_survives_what_anybody_publishes(channel: bytes, in_envelope: bool) -> None:
    listener = Listener().confirmed()
    for batch in batches():
        payloads = [seal(1, 1, 0, data, CONTROL) if in_envelope else data for data in batch]
        listener.tell(Pushed("s1", [[b"message", channel, payload] for payload in payloads]))
    if in_envelope and channel == C:
        assert listener.counters["malformed_messages"] > 3000
    listener.verify(listener.pass_time(1), PLAN_0)
    assert delivered(listener.push("s1", C, message(1, b"real", publisher=99))) == [b"real"]


def test_a_subscriber_survives_what_servers_store() -> None:
    listener = Listener()
    actions = [*listener.subscribe(), *listener.up("s1")]
    for data in filter(is_no_entry, corpus()[::7]):
        for reply in ([data, b"", None], [b"1", data, None], [b"1", b"", data], data, [data]):
            actions = answered(listener, actions, reply)
    assert listener.counters["malformed_messages"] + listener.counters["malformed_plans"] > 1000
    got = listener.verify([*actions, *listener.pass_time(1)], PLAN_0)
    assert SubscriptionConfirmed(C) in got


def is_no_entry(data: bytes) -> bool:
    try:
        unpack_entry(data)
    except MalformedMessage:
        return True
    return False


def answered(listener: Listener, actions: list[Any], value: Any) -> list[Any]:
    """Answer each verification with ``value``; return what is asked then, after a while."""
    asked = [action for action in actions if isinstance(action, Send) and action.args[0] == b"HMGET"]
    assert asked, "it asks again and again"
    after: list[Any] = []
    for send in asked:
        after += listener.tell(Replied(send.link, send.tag, value))
    for _ in range(20):
        if any(isinstance(action, Send) and action.args[0] == b"HMGET" for action in after):
            break
        after += listener.pass_time(0.5)
    return after


@pytest.mark.parametrize("channel", [INBOX, CLIENTS_CHANNEL])
def test_a_publisher_survives_what_anybody_publishes(channel: bytes) -> None:
    publisher = Publisher().connected("s1", "s2")
    publisher.answer(publisher.publish())
    for batch in batches():
        publisher.answer(publisher.tell(Pushed("s1", [[b"message", channel, data] for data in batch])))
    assert publisher.publisher.counters["malformed_messages"] > 3000
    publisher.pass_time(5)
    assert numbers(publisher.publish(OTHER), OTHER)


@pytest.mark.parametrize("in_envelope", [False, True])
def test_a_pattern_subscriber_survives_what_anybody_publishes(in_envelope: bool) -> None:
    matcher = Matcher().confirmed()
    for batch in batches():
        payloads = [seal(1, 1, 0, data, CONTROL) if in_envelope else data for data in batch]
        matcher.matched("s1", *payloads)
    real = message(1, b"real", publisher=99, flags=FIRST)
    assert matched([*matcher.matched("s1", real), *matcher.pass_time(3)]) == [b"real"]


# An administrator.


def test_an_administrator_survives_what_anybody_publishes_in_its_inbox() -> None:
    machine = AdminMachine("redis://a", AdminRequest(77, "status"))
    machine.handle(Start(), 0.0)
    machine.handle(LinkUp("server"), 0.0)
    machine.handle(Pushed("server", [[b"subscribe", operator_inbox(77), 1]]), 0.0)
    for batch in batches():
        assert not machine.handle(Pushed("server", [[b"message", operator_inbox(77), data] for data in batch]), 1.0)
    assert machine.ignored == len(corpus())
    reply = AdminReply(77, {"version": 3})
    push = [b"message", operator_inbox(77), pack_control(reply)]
    assert machine.handle(Pushed("server", [push]), 2.0) == [Answered(reply)]
