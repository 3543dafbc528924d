"""How the commands of operators reach a cluster: URL, configuration file, credentials and TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dynamoth.errors import ConfigError
from dynamoth_cli.cluster_access import Access, access_of, add_access
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_cli.main import main
from tests.tls import make_certificates, tls_in_front_of

FILE = """
[[cluster.servers]]
id = "s1"
url = "redis://10.0.0.1:6379"
[[cluster.servers]]
id = "s2"
url = "rediss://10.0.0.2:6380"

[link]
username = "balancer"
password = "from the file"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "dynamoth.toml"
    path.write_text(FILE)
    return str(path)


def reached(*given: str, environment: dict[str, str] | None = None) -> Access:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_access(parser)
    return access_of(parser.parse_args(given), environment or {})


def hosts(access: Access) -> list[str]:
    return [server.host for server in access.cluster.servers]


def test_the_file_of_the_daemons_is_enough(file: str) -> None:
    access = reached("--config", file)
    assert hosts(access) == ["10.0.0.1", "10.0.0.2"]
    assert [server.tls for server in access.cluster.servers] == [False, True]
    assert (access.link.username, access.link.password) == ("balancer", "from the file")
    assert reached(environment={"DYNAMOTH_CONFIG": file}) == access


def test_which_cluster_is_said_by_the_nearest_source(file: str) -> None:
    url = {"DYNAMOTH_URL": "redis://b"}
    assert hosts(reached("--url", "redis://a", "--config", file, environment=url)) == ["a"]
    assert hosts(reached("--config", file, environment=url)) == ["10.0.0.1", "10.0.0.2"]
    assert hosts(reached(environment={**url, "DYNAMOTH_CONFIG": file})) == ["b"]
    assert hosts(reached(environment={"DYNAMOTH_SERVERS": "s1=redis://c"})) == ["c"]
    with pytest.raises(ConfigError, match="which cluster"):
        reached()


def test_no_password_is_on_the_command_line(file: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("from a file of its own\n")
    access = reached("--config", file, "--username", "ops", "--password-file", str(secret))
    assert (access.link.username, access.link.password) == ("ops", "from a file of its own")
    access = reached("--url", "redis://a", environment={"DYNAMOTH_LINK_PASSWORD": "from the environment"})
    assert access.link.password == "from the environment"
    access = reached("--url", "dynamoths://ops@a,b", "--password-file", str(secret))
    assert {(server.username, server.password) for server in access.cluster.servers} == {
        ("ops", "from a file of its own")
    }
    access = reached("--url", "dynamoth://ops:own@a", "--password-file", str(secret))
    assert access.cluster.first.password == "own"
    access = reached("--url", "dynamoth://ops@a")
    assert access.cluster.first.password is None
    with pytest.raises(SystemExit):
        reached("--url", "redis://a", "--password", "x")


@pytest.mark.parametrize(("text", "accepted"), [(None, "can be read"), ("", "first line"), ("\n", "first line")])
def test_a_password_file_that_has_none_is_refused(text: str | None, accepted: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    if text is not None:
        secret.write_text(text)
    with pytest.raises(ConfigError, match=rf"link\.password_file: .*{accepted}.*flag --password-file"):
        reached("--url", "redis://a", "--password-file", str(secret))


def test_certificates_are_given_as_to_the_daemons(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"link\.tls_ca_file: a file that can be read .*flag --tls-ca-file"):
        reached("--url", "rediss://a", "--tls-ca-file", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match=r"link\.tls_key_file"):
        reached("--url", "rediss://a", "--tls-cert-file", "x")


def test_servers_that_do_not_answer_are_named_where_the_others_have_no_plan(
    redis_server: EmbeddedRedis, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"dynamoth://127.0.0.1:{redis_server.port},127.0.0.1:{free_port}"
    assert main(["plan", "show", "--url", url]) == 1
    said = capsys.readouterr().err
    assert "more than half of the servers" in said
    assert f"127.0.0.1:{free_port}: connection refused" in said


def test_a_server_that_asks_for_a_certificate_gets_it(
    redis_server: EmbeddedRedis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificates = make_certificates(tmp_path)
    with tls_in_front_of(redis_server.port, certificates, asks_for_client=True) as port:
        url = ("--url", f"rediss://localhost:{port}", "--tls-ca-file", str(certificates.authority))
        own = ("--tls-cert-file", str(certificates.client), "--tls-key-file", str(certificates.client_key))
        assert main(["plan", "show", *url, *own]) == 1
        assert "no server stores a plan yet" in capsys.readouterr().err, "it was let in"
        assert main(["plan", "show", *url]) == 1
        assert "no server of the cluster answers" in capsys.readouterr().err
