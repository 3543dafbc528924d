"""The configuration of a data cluster: what is refused, and how it reaches servers with users and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynamoth.errors import ConfigError
from dynamoth.settings.load import ConfigText, load_config
from dynamoth_analytics.cluster.process import DataClusterConfig
from dynamoth_analytics.cluster.servers import read_servers
from dynamoth_cli.commands.data_cluster import data_cluster_config
from dynamoth_cli.local.embedded import EmbeddedRedis
from dynamoth_cli.main import main
from dynamoth_client.asyncio import from_url as connect
from dynamoth_client.datasets import DatasetWriter
from tests.tls import make_certificates, tls_in_front_of

SERVERS = '[[cluster.servers]]\nid = "s1"\nurl = "redis://127.0.0.1:1"\n'


def config_of(text: str) -> DataClusterConfig:
    return data_cluster_config(load_config(file=ConfigText("x.toml", text)))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("", "data_cluster.logs: name the log servers"),
        ("logs = 'l1=http://127.0.0.1:1'", "data_cluster.logs: "),
        ("logs = 'l1=redis://127.0.0.1:1 l1=redis://127.0.0.1:2'", "each ID once"),
        ("logs = 'l1=redis://127.0.0.1:1'\nfolder = ''", "data_cluster.folder: name the folder"),
        ("logs = 'l1=redis://127.0.0.1:1'\n[link]\npassword_file = 'nowhere'", "link.password_file"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(settings: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(f"{SERVERS}[data_cluster]\n{settings}\n")


def test_passwords_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.toml"
    file.write_text(f"{SERVERS}[data_cluster]\nlogs = 'l1=redis://me:hush@127.0.0.1:1 l2=redis://:hush@127.0.0.1:2'\n")
    assert main(["data-cluster", "--config", str(file), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "hush" not in printed
    assert 'logs = "l1=redis://me:***@127.0.0.1:1 l2=redis://:***@127.0.0.1:2"' in printed


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """A server with TLS that asks for a certificate, and for a password: settings for it."""
    certificates = make_certificates(tmp_path)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(password="hush"))
        port = stack.enter_context(tls_in_front_of(redis.port, certificates, asks_for_client=True))
        url = f"rediss://localhost:{port}"
        yield "\n".join([
            '[[cluster.servers]]', 'id = "s1"', f'url = "{url}"', "[data_cluster]", f'logs = "l1={url}"',
            "[link]", "password = 'hush'", f"tls_ca_file = '{certificates.authority}'",
            f"tls_cert_file = '{certificates.client}'", f"tls_key_file = '{certificates.client_key}'", "",
        ])  # fmt: skip


def test_every_connection_has_the_credentials_and_the_tls_of_the_links(guarded: str) -> None:
    config = config_of(guarded)
    assert config.servers.run("l1", (b"PING",)) == b"PONG"
    options = config.servers.options()
    assert read_servers(options["logs"], options=options) == config.servers, "the source and the sink get the same"

    async def use() -> None:
        async with connect(config.cluster_url) as client:
            assert await client.publish("news", "hello") == 0
        logs = dict(config.servers.urls)
        async with DatasetWriter(logs, options=config.link) as writer:
            catalog = await writer.catalog()
            assert catalog.datasets == {}

    asyncio.run(use())
