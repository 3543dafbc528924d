from __future__ import annotations

from dynamoth.machine.events import Connect, ErrorReply, LinkDown, LinkUp, Pushed, Replied, Send, Start
from dynamoth.machine.outbox import Outbox
from dynamoth.names import AGENT_CHANNEL, BALANCER_CHANNEL
from dynamoth.plan.plan import single
from dynamoth.protocol.control import PlanChange, pack_control
from dynamoth.protocol.envelope import seal
from dynamoth_agent.events import LinkChanged, ObservationRefused, PlanFollowed
from dynamoth_lla.round import ObservationLate
from tests.agent.bench import AT_S2, PLAN, Bench


def test_it_asks_for_its_links_at_the_start() -> None:
    bench = Bench()
    assert bench.tell(Start()) == [Connect("local", "redis://h1"), Connect("reports", "redis://h1")]


def test_the_connection_is_named_before_it_is_subscribed_and_observed_before_it_is_measured() -> None:
    bench = Bench()
    bench.tell(Start())
    actions = [action for action in bench.tell(LinkUp("local", "run1"), answer=False) if isinstance(action, Send)]
    names = [tuple(action.args[:2]) for action in actions]
    order = [(b"CLIENT", b"SETNAME"), (b"PSUBSCRIBE", b"*"), (b"PUBSUB", b"NUMSUB"), (b"INFO", b"stats")]
    assert sorted(order, key=names.index) == order
    assert names.index((b"CLIENT", b"SETNAME")) < names.index((b"SUBSCRIBE", AGENT_CHANNEL))


def test_it_is_ready_when_it_observes_and_knows_a_plan() -> None:
    bench = Bench()
    bench.plan = None
    bench.up()
    assert (bench.machine.is_up, bench.machine.is_ready) == (True, False)
    bench.plan = PLAN
    bench.to_next_deadline()
    assert (bench.machine.is_up, bench.machine.is_ready) == (True, True)
    bench.tell(LinkDown("local", "lost"))
    assert (bench.machine.is_up, bench.machine.is_ready) == (False, False)


def test_messages_go_to_dispatcher_and_analyzer() -> None:
    """The channel's home is s2: the dispatcher forwards; and the report of the analyzer has it."""
    bench = Bench()
    bench.up()
    actions = bench.tell(Pushed("local", [[b"pmessage", b"*", AT_S2, seal(77, 1, 0, b"hello")]]))
    assert Connect("to:s2", "redis://h2") in actions
    actions = bench.tell(LinkUp("to:s2", "run2"))
    (forward,) = [action for action in actions if isinstance(action, Send)]
    assert forward.link == "to:s2" and forward.args[:2] == (b"PUBLISH", AT_S2)
    assert isinstance(forward.tag, Outbox)
    assert bench.tell(Replied("to:s2", forward.tag, 1)) == []
    assert AT_S2 in bench.first_report().columns.channels


def test_reports_say_the_version_of_the_dispatchers_plan_and_people_hear_of_it() -> None:
    bench = Bench()
    bench.up()
    newer = PLAN.begin({b"a": single("s1" if PLAN.entry(b"a").route.assignment == single("s2") else "s2")})
    change = pack_control(PlanChange(PLAN.diff(newer)))
    bench.tell(Pushed("local", [[b"message", AGENT_CHANNEL, change]]))
    assert [action.version for action in bench.said(PlanFollowed)] == [0, 1]
    assert bench.first_report().plan_version == 1


def test_a_link_that_is_down_is_said_once_per_reason() -> None:
    bench = Bench()
    bench.tell(Start())
    for reason in ("refused", "refused", "wrong password", "wrong password", "refused"):
        bench.tell(LinkDown("local", reason))
    bench.tell(LinkUp("local", "run1"))
    bench.tell(LinkDown("local", "refused"))
    said = [action.reason for action in bench.said(LinkChanged)]
    assert said == ["refused", "wrong password", "refused", None, "refused"]


def test_actions_of_the_analyzer_come_through() -> None:
    bench = Bench()
    bench.tell(Start())
    sent = bench.tell(LinkUp("local", "run1"), answer=False)
    bench.now += 3.0
    for action in sent:
        if isinstance(action, Send) and action.tag is not None and action.tag[0] == "lla":
            bench.tell(Replied("local", action.tag, b""))
    assert ObservationLate(True, 3.0) in bench.other


def test_its_deadline_is_the_earliest() -> None:
    bench = Bench()
    assert bench.machine.deadline() is None
    bench.plan = None
    bench.up()
    retry = bench.machine.dispatcher.deadline()
    report = bench.machine.load_analyzer.deadline()
    assert retry is not None and report is not None
    assert bench.machine.deadline() == min(retry, report)
    bench.tell(LinkDown("local", "lost"))
    assert bench.machine.deadline() is None


def test_an_agent_that_may_not_observe_is_not_ready_says_why_and_acknowledges_nothing() -> None:
    bench = Bench()
    bench.tell(Start())
    bench.tell(LinkUp("local", "run1"))
    [psubscribe] = [send for send in bench.sent if send.args[0] == b"PSUBSCRIBE"]
    bench.tell(Replied("local", psubscribe.tag, ErrorReply("NOPERM this user has no permissions")))
    assert (bench.machine.is_ready, bench.machine.plan_version) == (False, 0)
    assert "NOPERM" in (bench.machine.problem or "") and "dynamoth acl" in (bench.machine.problem or "")
    [refused] = bench.said(ObservationRefused)
    assert refused.reason == bench.machine.problem
    assert "NOPERM" in bench.first_report().why_unobserved
    sent = [args[2] for args in bench.commands() if args[:2] == (b"PUBLISH", BALANCER_CHANNEL)]
    assert len(sent) == len(bench.reports("local")), "no acknowledgement"
    bench.tell(LinkDown("local", "lost"))
    bench.up()
    assert bench.machine.is_ready and not bench.machine.problem


def test_a_report_says_that_another_server_refuses_what_is_forwarded() -> None:
    bench = Bench()
    bench.up()
    bench.tell(Pushed("local", [[b"pmessage", b"*", AT_S2, seal(77, 1, 0, b"hello")]]))
    [forward] = [action for action in bench.tell(LinkUp("to:s2", "run2")) if isinstance(action, Send)]
    bench.tell(Replied("to:s2", forward.tag, ErrorReply("NOPERM no")))
    [(kind, text)] = bench.first_report().problems
    assert kind == "forwards_refused" and "server s2 refuses forwarded messages" in text and "NOPERM no" in text
