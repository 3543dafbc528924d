"""From a loaded configuration to the configurations of the daemons."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace

import pytest

from dynamoth.errors import ConfigError
from dynamoth.plan.plan import Server
from dynamoth.settings.load import ConfigText, load_config
from dynamoth.settings.sections import PlanningSettings
from dynamoth_cli.commands.agent import agent_config
from dynamoth_cli.commands.balancer import balancer_config
from dynamoth_cli.settings import link_options

FILE = """
[[cluster.servers]]
id = "s1"
url = "redis://a"
[[cluster.servers]]
id = "s2"
url = "rediss://b"
outgoing_bytes_per_s_max = 77
[link]
username = "u"
password = "p"
connect_timeout_s = 2
ping_interval_s = 0
ping_timeout_s = 3
tls_verify = false
[agent]
server = "s2"
http_host = "0.0.0.0"
http_port = 9000
report_interval_s = 0.5
channels_per_report_max = 10
[balancer]
load_ratio_high = 0.7
load_ratio_safe = 0.5
wait_s = 1
averaging_s = 2
channel_rest_s = 3
moves_per_plan_max = 4
moves_per_server_max = 5
transitions_max = 6
agent_stale_s = 7
lease_s = 8
http_host = "::1"
http_port = 9001
"""
LOADED = load_config(file=ConfigText("x", FILE))


def test_an_agent_gets_what_is_its_own() -> None:
    config = agent_config(LOADED)
    assert (config.server, config.url, config.outgoing_bytes_per_s_max) == ("s2", "rediss://b", 77)
    assert (config.report_interval_s, config.channels_per_report_max) == (0.5, 10)
    assert (config.http_host, config.http_port) == ("0.0.0.0", 9000)


def test_a_lease_that_is_too_short_is_refused_with_its_place() -> None:
    loaded = load_config(file=ConfigText("x", FILE.replace("lease_s = 8", "lease_s = 1")))
    with pytest.raises(ConfigError, match=r"balancer\.lease_s must be at least 1\.5 \(s\), not 1 \(from x line 32, "):
        balancer_config(loaded)


def test_the_balancer_gets_every_option_that_is_a_setting() -> None:
    config = balancer_config(LOADED)
    assert config.servers == (Server("s1", "redis://a"), Server("s2", "rediss://b"))
    assert (config.http_host, config.http_port) == ("::1", 9001)
    written = tomllib.loads(FILE)["balancer"]
    options = {name: value for name, value in written.items() if not name.startswith("http_")}
    assert options == {name: getattr(config.options, name) for name in options}
    assert {field.name for field in fields(PlanningSettings)} >= options.keys()


def test_the_balancer_gets_the_servers_that_are_being_drained() -> None:
    assert balancer_config(LOADED).options.draining == frozenset()
    drained = FILE.replace('url = "redis://a"', 'url = "redis://a"\ndraining = true')
    assert balancer_config(load_config(file=ConfigText("x", drained))).options.draining == {"s1"}


def test_the_links_get_credentials_timeouts_and_tls() -> None:
    link = link_options(LOADED, "me")
    assert (link.username, link.password, link.client_name) == ("u", "p", "me")
    assert (link.connect_timeout_s, link.ping_interval_s, link.ping_timeout_s) == (2, 0, 3)
    assert not link.tls.verify
    defaults = link_options(load_config())
    assert (defaults.username, defaults.password, defaults.tls.ca_file) == (None, None, None)


def test_links_have_the_same_defaults_as_their_settings() -> None:
    options = link_options(load_config())
    assert options.trust is not None, "a daemon trusts the servers of its configuration only, here none"
    assert not options.trust.hosts and not options.trust.everything
    assert replace(options, trust=None) == type(options)()
