"""The words of ``dynamoth server``."""

from __future__ import annotations

import pytest

from dynamoth_cli.commands.server import describe_change, describe_servers
from dynamoth_cli.local.cluster import LocalCluster
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_cli.main import main
from dynamoth_daemon.exit_codes import EXIT_FAILED, EXIT_REFUSED
from tests.whole.harness import until


@pytest.mark.parametrize(
    ("action", "note", "text"),
    [
        ("drain", "", "s1 is being drained: 'dynamoth server list' shows what is left there"),
        ("undrain", "", "s1 is not drained any more: it takes channels again, by load"),
        ("drain", "it is being drained already", "s1: it is being drained already"),
        (
            "add",
            "",
            "s1 is in the plan: it gets slots when its agent reports. Start 'dynamoth agent --server s1' with the"
            " configuration of the other agents, which need not name it yet",
        ),
        ("remove", "", "s1 is not in the plan any more: stop it and its agent, and take it out of the configuration"),
    ],
)
def test_a_change_is_described(action: str, note: str, text: str) -> None:
    assert describe_change({"action": action, "server": "s1", "version": 7, "note": note}) == text


def test_a_url_with_a_password_goes_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "add", "s4", "redis://:secret@localhost:1", "--url", "redis://localhost:1"]) == EXIT_REFUSED
    printed = capsys.readouterr().err
    assert "the plan shows URLs to every client: leave them out" in printed and "secret" not in printed


def test_the_agent_of_a_server_that_only_the_plan_has_finds_it_there(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(2) as cluster, EmbeddedRedis() as added:
        file = str(cluster.config_file)
        assert main(["server", "add", "s3", f"redis://127.0.0.1:{added.port}", "--config", file]) == 0
        assert "Start 'dynamoth agent --server s3'" in capsys.readouterr().out
        agent = cluster.another_agent("s3")
        agent.start()
        try:
            until(lambda: cluster.ask_balancer("status")["servers"]["s3"]["agent"] == "alive", "its agent is heard")
            assert not cluster.ask_balancer("status")["servers"]["s3"]["problem"]
        finally:
            agent.stop()
        assert main(["agent", "--check", "--server", "s4", "--config", file]) == EXIT_REFUSED
        refusal = capsys.readouterr().err
        assert (
            "the id of a server of the configuration (s1, s2), or of the plan (s1, s2, s3), expected, not 's4'"
            in refusal
        )


def test_an_agent_that_cannot_look_into_the_plan_for_its_server_can_be_started_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["agent", "--check", "--server", "s2", "--servers", "s1=redis://127.0.0.1:1"]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert "'s2' is none of the servers of the configuration (s1)" in error and "connection refused" in error


def test_servers_are_listed_with_what_is_left() -> None:
    known = {"link": "up", "agent": "alive", "draining": False, "channels_left": None, "slots_left": None}
    drained = {**known, "draining": True, "channels_left": None, "channels_named": 2, "slots_left": 1}
    unknown = dict.fromkeys((*known, "channels_named"), None)
    servers = {
        "s1": {"url": "redis://a", **known, "channels_named": None},
        "s2": {"url": "redis://b", **drained},
        "s30": {"url": "redis://c", **drained, "channels_named": 0, "slots_left": 0},
        "s4": {"url": "redis://d", **unknown},
    }
    assert [*describe_servers(servers)] == [
        "s1   redis://a  link up, agent alive",
        "s2   redis://b  link up, agent alive, draining: 2 channels and 1 slot left",
        "s30  redis://c  link up, agent alive, draining: nothing left",
        "s4   redis://d  link unknown, agent unknown",
    ]
