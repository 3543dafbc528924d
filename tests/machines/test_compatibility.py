"""Publishers and dispatchers follow compatibility rules: what is plain stays readable for plain Redis clients."""

from __future__ import annotations

from typing import Any

from dynamoth.machine.events import Replied, Send
from dynamoth.names import CLIENTS_CHANNEL, inbox
from dynamoth.plan.compatibility import Compatibility, CompatibilityRule
from dynamoth.protocol.control import RulesChanged, pack_control, unpack_control
from dynamoth.protocol.envelope import FIRST, is_enveloped, open_envelope, seal
from dynamoth.protocol.plan_wire import pack_compatibility
from dynamoth.protocol.stored_plan import READ_RULES
from tests.machines.agent import Agent
from tests.machines.helpers import PLAN_0, C, commands, published, tagged
from tests.machines.publisher import ID, Publisher

PLAIN = PLAN_0.with_entries({}, 1).following(Compatibility(1, (CompatibilityRule(b"*", "s1"),)))
LIFTED = Compatibility(2, (CompatibilityRule(b"*", "s1", plain=False),))


def rules_reply(rules: Compatibility) -> list[bytes | None]:
    return [b"%d" % rules.version, b"", b"0", pack_compatibility(rules)]


def test_a_lifted_channel_gets_envelopes_and_numbers_that_begin_anew() -> None:
    publisher = Publisher(header=PLAIN).connected()
    assert published(publisher.publish(C), C, "s1") == [b"x"]
    [read] = publisher.push("s1", CLIENTS_CHANNEL, pack_control(RulesChanged(2)))
    assert read == Send("s1", READ_RULES, ("rules",))
    assert publisher.push("s1", CLIENTS_CHANNEL, pack_control(RulesChanged(2))) == [], "it is being read"
    publisher.tell(Replied("s1", read.tag, rules_reply(LIFTED)))
    [first] = published(publisher.publish(C), C, "s1")
    assert open_envelope(first).flags & FIRST
    assert publisher.push("s1", CLIENTS_CHANNEL, pack_control(RulesChanged(2))) == [], "it is known"


def test_a_channel_that_becomes_plain_has_no_envelopes_and_no_heartbeats_any_more() -> None:
    publisher = Publisher(header=PLAN_0.following(LIFTED)).connected()
    publisher.answer(publisher.publish(C))
    again = Compatibility(3, PLAIN.compatibility.rules)
    [read] = publisher.push("s1", inbox(ID), pack_control(RulesChanged(3)))
    publisher.tell(Replied("s1", read.tag, rules_reply(again)))
    publisher.answer(publisher.publish(C))
    publisher.down("s1")
    actions = publisher.up("s1")
    assert not [data for data in published(actions, C) if is_enveloped(data)]
    assert [send.args for send in tagged(actions, "rules")] == [READ_RULES], "they may have changed meanwhile"


def test_rules_come_with_every_reading_of_a_channel() -> None:
    publisher = Publisher(header=PLAIN).connected()
    [read] = tagged(publisher.publish(C), "entry")
    publisher.tell(Replied("s1", read.tag, [b"2", b"", None, pack_compatibility(LIFTED)]))
    assert is_enveloped(published(publisher.publish(C), C, "s1")[0])


def test_older_rules_and_malformed_ones_are_ignored() -> None:
    publisher = Publisher(header=PLAN_0.following(LIFTED)).connected()
    [read] = publisher.push("s1", CLIENTS_CHANNEL, pack_control(RulesChanged(9)))
    publisher.tell(Replied("s1", read.tag, rules_reply(PLAIN.compatibility)))
    [read] = publisher.push("s1", CLIENTS_CHANNEL, pack_control(RulesChanged(9)))
    publisher.tell(Replied("s1", read.tag, [b"9", b"", b"9", b"nonsense"]))
    assert is_enveloped(published(publisher.publish(C), C, "s1")[0])


# The dispatcher.


def notified(actions: list[Any]) -> list[tuple[bytes, int]]:
    """Return who is notified of which version of the rules."""
    notices: list[tuple[bytes, int]] = []
    for channel, data in commands(actions, b"PUBLISH"):
        if channel in (CLIENTS_CHANNEL, inbox(ID)) and isinstance(message := unpack_control(data), RulesChanged):
            notices.append((channel, message.version))
    return notices


def test_a_dispatcher_notifies_the_publishers_of_its_server_that_rules_have_changed() -> None:
    agent = Agent().holding(PLAN_0)
    actions = agent.change(PLAN_0, PLAN_0.with_compatibility(LIFTED.rules))
    assert notified(actions) == [(CLIENTS_CHANNEL, 1)]


def test_plain_messages_at_a_wrong_server_are_forwarded_as_they_are() -> None:
    agent = Agent("s2").holding(PLAIN)
    agent.observe(b"first")  # which connects
    assert published(agent.connect("s1"), C, "to:s1") == [b"first"]
    assert published(agent.observe(b"plain"), C, "to:s1") == [b"plain"]


def test_who_sends_envelopes_on_a_plain_channel_is_notified_of_the_rules() -> None:
    agent = Agent().holding(PLAIN)
    assert notified(agent.observe(seal(ID, 1, 0, b"x"))) == [(inbox(ID), 1)]
    assert agent.observe(b"plain") == []
