"""Scripts about fleets that are upgraded gradually: plain Redis clients at s1, which they know, beside upgraded ones.

See ``scenarios`` for the words; ``mutations`` has what must make each of them fail. R is a plain client that publishes,
L one that listens.
"""

from __future__ import annotations

from contextlib import ExitStack

from dynamoth.plan.compatibility import CompatibilityRule
from dynamoth.plan.plan import Phase, Plan, single
from dynamoth.protocol.envelope import is_enveloped
from dynamoth_sim.cluster import PLAIN_REST_S
from dynamoth_sim.load.plain import PlainSubscriberApp
from dynamoth_sim.scenarios.stage import Scenario, SceneFailed, Stage

ALL_AT_S1 = (CompatibilityRule(b"*", "s1"),)

FOLLOWED_S_MAX = 0.5
"""Longest time until every connected publisher follows a change of rules."""

MANY = 5

HURRIED = 800
"""Messages, each a millisecond after the other: some come while a subscriber listens at the old and the new place."""


def _listener(stage: Stage, name: str, *channels: bytes) -> PlainSubscriberApp:
    app = PlainSubscriberApp(stage.cluster, name, "s1", channels)
    app.start()
    stage.wait(f"{name} listens", app.is_confirmed)
    return app


def _change(stage: Stage, action: str, pattern: bytes, server: str | None = None) -> None:
    """Change rules, asking until the balancer finds it safe, and wait until they are in force."""
    answers = stage.cluster.answers
    end = stage.world.now + PLAIN_REST_S + 1.0
    while True:
        request = stage.cluster.change_rules(action, pattern, server)
        stage.wait(f"the balancer answers to {action}", lambda asked=request: asked in answers)  # type: ignore[misc]
        if answers[request] is None:
            return
        if stage.world.now > end or "try again" not in str(answers[request]):
            stage.expect(f"the balancer lets administrators {action} a rule: {answers[request]}", False, pattern)
            raise SceneFailed(action)
        stage.run(0.2)


def _plans(stage: Stage) -> list[Plan]:
    return [plan for server in stage.cluster.servers if (plan := stage.cluster.stored_plan(server)) is not None]


def _are_enveloped(stage: Stage, channel: bytes, since: float) -> set[bool]:
    """Return whether what the clients of Dynamoth have published had envelopes."""
    records = stage.records("publishes", channel=channel, since=since, who="P.p")
    return {is_enveloped(record.data) for record in records if record.data is not None}


def plain_fleet(stage: Stage) -> None:
    """Case 44. Half of the fleet is upgraded: everybody hears everybody, wherever the ring would put the channel.

    Messages carry no envelopes, and an administrator cannot move the channel away, nor can a new balancer.
    """
    channel = stage.channel_at("s2")
    _listener(stage, "L", channel)
    stage.subscriber("S", channel)
    stage.pattern_subscriber("T", b"c*")
    publisher = stage.publisher("P")
    plain = stage.raw_publisher("R", "s1", channel)
    lost = stage.raw_publisher("raw2", "s2", channel)  # it knows the wrong server
    since = stage.world.now
    for number in range(MANY):
        stage.publish(publisher, channel)
        plain.publish()
        lost.publish()
        stage.run(0.1)
        if number == 0:
            stage.cluster.change(channel, single("s2"))
        if number == 1:
            stage.cluster.restart_balancer()
            stage.run(1.0)
            rules = {plan.compatibility.rules for plan in _plans(stage)}
            stage.expect(f"the rules outlive a balancer: {rules}", rules == {ALL_AT_S1}, channel)
            stage.cluster.change(channel, single("s3"))
            stage.run(1.0)
    stage.expect("no message has an envelope", _are_enveloped(stage, channel, since) == {False}, channel)
    stage.run(0.2)


def plain_lifted(stage: Stage) -> None:
    """Case 45. All are upgraded but R, and ``plain`` is lifted; the channel moves when every publisher knows.

    P hears of it late, while the channel would move already: it publishes plain messages at H0.
    """
    channel = stage.channel_at("s2")
    listener = _listener(stage, "L", channel)
    stage.subscriber("S", channel)
    publisher = stage.trusting_publisher("P")
    plain = stage.raw_publisher("raw1", "s1", channel)
    for _ in range(MANY):
        stage.publish(publisher, channel)
        plain.publish()
        stage.run(0.05)
    listener.stop()
    with ExitStack() as later:
        later.enter_context(stage.held("P", "s1", to_server=False))
        _change(stage, "lift", channel)
        for number in range(HURRIED):
            if number % 100 == 0:  # an administrator who is in a hurry
                stage.cluster.change(channel, single("s2"))
            publisher.publish(channel)
            stage.run(0.001)
    stage.run(FOLLOWED_S_MAX)
    since = stage.world.now
    stage.publish(publisher, channel)
    stage.expect("messages have envelopes again", _are_enveloped(stage, channel, since) == {True}, channel)
    stage.run(1.0)
    stage.move(channel, "s2", Phase.ACTIVE)
    for _ in range(MANY):
        stage.publish(publisher, channel)
        plain.publish()
        stage.run(0.05)


def plain_again(stage: Stage) -> None:
    """Case 46. A cluster in use gets a rule for one channel, which is moved to s1 before; then L comes.

    Publishers follow at once, also Q, which knows only the old server; so L reads everything.
    """
    channel = stage.channel_with_subscriber("s2")
    publisher, sleeper = stage.publisher("P"), stage.publisher("Q")
    for app in (publisher, sleeper):
        stage.publish(app, channel)
    stage.cluster.change_rules("add", channel, "s1")
    stage.run(0.5)
    stage.expect("a rule moves nothing by itself", not any(plan.compatibility.rules for plan in _plans(stage)), channel)
    stage.move(channel, "s1")
    stage.publish(publisher, channel)
    _change(stage, "add", channel, "s1")
    stage.run(FOLLOWED_S_MAX)
    stage.publish(sleeper, channel)
    stage.run(FOLLOWED_S_MAX)
    _listener(stage, "L", channel)
    since = stage.world.now
    for _ in range(MANY):
        stage.publish(publisher, channel)
        stage.publish(sleeper, channel)
    stage.expect("messages have no envelopes", _are_enveloped(stage, channel, since) == {False}, channel)


def plain_behind_numbered(stage: Stage) -> None:
    """Case 68. A channel becomes plain while T, a new subscriber of a pattern, waits for what came before P's latest.

    P's plain messages come behind the numbered one that T holds.
    """
    channel = stage.channel_at("s1")
    for server in ("s2", "s1"):  # a rule is for what the plan names
        stage.move(channel, server)
    stage.run(PLAIN_REST_S)
    publisher = stage.publisher("P", channel)
    with stage.held("P", "s1", to_server=False):
        _change(stage, "add", channel, "s1")
        publisher.publish(channel)
        stage.run(0.01)
        stage.pattern_subscriber("T", channel[:1] + b"*")
        with stage.held("T", "s1", to_server=False):
            publisher.publish(channel)
            stage.run(0.3)
    stage.run(0.1)
    since = stage.world.now
    stage.publish(publisher, channel, times=MANY)
    stage.expect("messages have no envelopes", _are_enveloped(stage, channel, since) == {False}, channel)


SCENARIOS: dict[str, Scenario] = {
    "44-plain-fleet": Scenario(plain_fleet, compatibility=ALL_AT_S1),
    "45-plain-lifted": Scenario(plain_lifted, compatibility=ALL_AT_S1),
    "46-plain-again": Scenario(plain_again),
    "68-plain-behind-numbered": Scenario(plain_behind_numbered),
}
