"""An agent says what to type when the plan does not list its server."""

from __future__ import annotations

from dynamoth.machine.events import LinkUp, Pushed, Replied, Start
from dynamoth.names import AGENT_CHANNEL
from dynamoth.plan.plan import Plan, Server
from dynamoth.protocol.control import PlanChange, pack_control
from dynamoth.protocol.stored_plan import write_whole
from dynamoth_agent.events import NotListed
from dynamoth_agent.machine import AgentMachine
from dynamoth_dispatcher.events import LOCAL
from dynamoth_dispatcher.followed_plan import TAG_PLAN
from dynamoth_lla.options import LoadAnalyzerOptions

SERVERS = [Server(id_, f"redis://{id_}") for id_ in ("s1", "s2", "s3")]


def following(plan: Plan, server: str) -> tuple[AgentMachine, list[str]]:
    """Return an agent that has read a stored plan, and what it says of its server."""
    agent = AgentMachine(server, 7, None, LoadAnalyzerOptions(outgoing_bytes_per_s_max=1000), f"redis://{server}")
    agent.handle(Start(), 0.0)
    agent.handle(LinkUp(LOCAL, "run"), 0.0)
    words = [part for command in write_whole(plan, "run") if command[0] == b"HSET" for part in command[2:]]
    actions = agent.handle(Replied(LOCAL, (TAG_PLAN,), dict(zip(words[::2], words[1::2], strict=True))), 0.1)
    return agent, [action.reason for action in actions if isinstance(action, NotListed)]


def test_an_agent_of_a_server_that_the_plan_does_not_list_says_what_to_type() -> None:
    agent, said = following(Plan.initial(SERVERS), "s4")
    assert said == ["the plan does not list server s4: type 'dynamoth server add s4 URL', or stop this agent"]
    assert agent.not_listed == said[0]


def test_an_agent_of_a_server_that_was_removed_says_so() -> None:
    plan = Plan.initial(SERVERS[:2])
    wider = plan.administered(plan.administration, SERVERS)
    agent, said = following(wider, "s3")
    assert said == [] and agent.not_listed is None
    narrower = wider.administered(wider.administration.without_server("s3"), SERVERS[:2])
    change = pack_control(PlanChange(wider.diff(narrower)))
    actions = agent.handle(Pushed(LOCAL, [[b"message", AGENT_CHANNEL, change]]), 0.2)
    removed = "server s3 was removed from the plan: stop this agent, and take the server out of its file"
    assert [action.reason for action in actions if isinstance(action, NotListed)] == [removed]
    assert following(narrower, "s3")[1] == [removed]
