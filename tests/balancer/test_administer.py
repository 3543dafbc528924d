"""How an installer puts what administrators have decided, and other lists of servers, into the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from dynamoth.errors import RequestRefused
from dynamoth.machine.events import Send
from dynamoth.plan.administration import Administration
from dynamoth.plan.plan import Plan, Server, single
from dynamoth.protocol.stored_plan import ADMINISTRATION_FIELD, HEADER_FIELD, header_fields
from dynamoth_balancer.events import PlanChanged
from dynamoth_balancer.install.agents import Agents
from dynamoth_balancer.install.book import PlanBook
from dynamoth_balancer.install.installer import Installer
from dynamoth_balancer.options import BalancerOptions
from tests.balancer.cluster import stored_hash

S1, S2, S3 = (Server(f"s{number}", f"redis://s{number}") for number in (1, 2, 3))
RUN_ID = "run"
REASON = "an administrator's"


def installer_for(plan: Plan, stored_at: Iterable[str] = ()) -> Installer:
    """Return an installer for a plan that some servers store already."""
    servers = list(plan.servers.values())
    agents = Agents([server.id for server in servers], 5.0)
    installer = Installer(PlanBook(plan, {}), servers, agents, BalancerOptions(), 1, 0.0)
    for server in stored_at:
        [read] = installer.link_up(server, RUN_ID, 0.0, plan.version)
        assert isinstance(read, Send)
        stored = stored_hash(plan, RUN_ID)
        installer.on_reply(server, read.tag, [stored.get(name) for name in read.args[2:]], 0.0)
    return installer


def test_an_administration_has_a_version_of_its_own_and_is_written_to_every_server_that_is_up() -> None:
    plan = Plan.initial([S1, S2])
    installer = installer_for(plan, ["s1"])
    actions = installer.administer(replace(installer.plan.administration, paused=True), None, REASON, 1.0)
    assert installer.plan.version == installer.plan.administration.version == 1
    assert installer.plan.administration.paused
    assert actions[0] == PlanChanged(installer.plan, REASON)
    assert not [action for action in actions if isinstance(action, Send)]  # its copy is being audited
    [write] = [
        action.args
        for action in installer.on_reply("s1", ("copy", 1, 1, "length"), header_fields(plan), 1.0)
        if isinstance(action, Send)
    ]
    assert b"HSET" in write
    assert ADMINISTRATION_FIELD in write
    assert HEADER_FIELD not in write
    installer.check()


def test_a_new_server_gets_a_copy_and_no_channels_for_a_while_and_one_that_is_removed_is_unknown() -> None:
    installer = installer_for(Plan.initial([S1, S2]))
    installer.administer(installer.plan.administration, [S1, S2, S3], REASON, 1.0)
    assert installer.plan.base == ("s1", "s2")
    assert installer.copy("s3").version is None
    assert installer.joins_in("s3", 1.0) == BalancerOptions().join_s
    assert installer.index.slots_at["s3"] == set()
    installer.check()
    installer.administer(installer.plan.administration.without_server("s3"), [S1, S2], REASON, 2.0)
    assert "is not known" in (installer.why_not("s3", 2.0) or "")
    assert installer.plan.administration.removed == ("s3",)
    installer.check()


@pytest.mark.parametrize(
    ("administration", "servers", "why"),
    [
        (Administration(), [S1], "these are missing: s2"),
        (Administration(draining=frozenset({"s1", "s2"})), None, "all servers are being drained"),
        (Administration(pins={b"news": single("s3")}), None, "are drained, or have pinned channels: s3"),
    ],
)
def test_what_no_plan_can_have_is_refused_and_changes_nothing(
    administration: Administration, servers: list[Server] | None, why: str
) -> None:
    installer = installer_for(Plan.initial([S1, S2]))
    before = installer.plan
    with pytest.raises(RequestRefused, match=why):
        installer.administer(administration, servers, REASON, 1.0)
    assert installer.plan is before
    installer.check()
