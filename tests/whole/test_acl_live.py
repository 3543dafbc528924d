"""A cluster without ACLs gets them while it runs, in the order of ``docs/security.md``: nothing is lost."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import ExitStack

import pytest

from dynamoth_cli.commands.acl import PASSWORD_VARIABLE
from dynamoth_cli.local.child import dynamoth_command
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_link.errors import AuthenticationFailed
from tests.whole.acl_cluster import USERS, Rules, acl_log, all_rules
from tests.whole.harness import Traffic, channels_at, move, until

pytestmark = pytest.mark.usefixtures("patient_subscribers")

TIMEOUT_S = 60.0


def load_users(cluster: LocalCluster, rules: Rules) -> None:
    """Give every server the users that ``dynamoth acl`` prints, word for word."""
    variables = {role: PASSWORD_VARIABLE.format(role.upper().replace("-", "_")) for role in USERS}
    passwords = {variables[role]: password for role, (_, password) in USERS.items()}
    printed = subprocess.run(
        dynamoth_command("acl", "--redis", rules.redis, "--channels", "news.*"),
        env={**os.environ, **passwords},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout
    for server in cluster.server_ids:
        replies = cluster.ask(server, *([word.encode() for word in shlex.split(line)] for line in printed.splitlines()))
        assert replies == [b"OK"] * len(USERS)


@pytest.mark.parametrize("rules", all_rules(), ids=str)
def test_users_and_rights_are_given_to_a_cluster_that_runs(rules: Rules) -> None:
    [ours, yours], [theirs, others] = (channels_at(server, 2, prefix=b"news.") for server in ("s1", "s2"))
    with LocalCluster(2, redis_binary=rules.binary) as cluster, ExitStack() as later:
        with Traffic(cluster, [ours, theirs]) as before:
            load_users(cluster, rules)
            before.flows()
            cluster.log_in_as(USERS)
            before.flows()
            move(cluster, ours, "s2")
            after = later.enter_context(Traffic(cluster, [yours, others]))
            move(cluster, yours, "s2")
            before.flows()
            assert before.finish().gaps == 0, before.gaps
        assert acl_log(cluster) == []
        for server in cluster.server_ids:
            [connections, _] = cluster.ask(server, (b"CLIENT", b"LIST"), (b"ACL", b"SETUSER", b"default", b"off"))
            users = [line.partition(b" user=")[2].split()[0] for line in connections.splitlines()]
            assert users.count(b"default") == 1, "nobody but the one who asks"
            with pytest.raises(AuthenticationFailed):
                cluster.ask(server, (b"PING",))
        move(cluster, others, "s1")
        after.flows()
        command = dynamoth_command("status", "--url", cluster.url_of("operator"))

        def is_well() -> bool:
            status = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
            return (status.returncode, "!" in status.stdout) == (0, False)

        until(is_well, "the status shows no problem")
        assert after.finish().gaps == 0, after.gaps
