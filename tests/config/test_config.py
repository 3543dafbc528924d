"""Configuration: every source, their precedence, and messages that say what to do."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamoth.errors import ConfigError
from dynamoth.settings.load import ConfigText, FlagValue, LoadedConfig, declared_settings, format_config, load_config
from dynamoth.settings.sections import Config

SECTIONS = ("cluster", "link", "agent", "balancer", "broker", "coordinator", "log")
NOTHING: Mapping[str, str] = MappingProxyType({})
HUGE = "0x" + 9000 * "f"
"""More digits than Python writes."""

SERVERS = """
[[cluster.servers]]
id = "s1"
url = "redis://a:6379"

[[cluster.servers]]
id = "s2"
url = "redis://b:6379"
outgoing_bytes_per_s_max = 5
"""


def from_toml(text: str, **others: Any) -> LoadedConfig:
    return load_config(file=ConfigText("x.toml", text), **others)


def refusal(text: str = "", environment: Mapping[str, str] = NOTHING, **flags: str) -> str:
    given_flags = {key.replace("__", "."): FlagValue(f"--{key}", value) for key, value in flags.items()}
    with pytest.raises(ConfigError) as caught:
        from_toml(text, environment=environment, flags=given_flags)
    return str(caught.value)


def test_nothing_given_means_the_defaults() -> None:
    loaded = load_config()
    assert loaded.config == Config()
    assert not loaded.places
    assert loaded.config.balancer.load_ratio_high == 0.8
    assert loaded.config.log.format == "json"


def test_flag_over_environment_over_file_over_default() -> None:
    file = "[balancer]\nload_ratio_high = 0.91\nload_ratio_safe = 0.51\nwait_s = 3\n"
    environment = {"DYNAMOTH_BALANCER_LOAD_RATIO_HIGH": "0.92", "DYNAMOTH_BALANCER_LOAD_RATIO_SAFE": "0.52"}
    flags = {"balancer.load_ratio_high": FlagValue("--load-ratio-high", "0.93")}
    loaded = from_toml(file, environment=environment, flags=flags)
    balancer = loaded.config.balancer
    assert (balancer.load_ratio_high, balancer.load_ratio_safe) == (0.93, 0.52)
    assert (balancer.wait_s, balancer.averaging_s) == (3.0, 10.0)
    assert loaded.places == {
        "balancer.load_ratio_high": "flag --load-ratio-high",
        "balancer.load_ratio_safe": "environment variable DYNAMOTH_BALANCER_LOAD_RATIO_SAFE",
        "balancer.wait_s": "x.toml line 4, section [balancer]",
    }


def test_servers_from_a_file() -> None:
    loaded = from_toml("[cluster]\noutgoing_bytes_per_s_max = 7\n" + SERVERS)
    assert [dataclasses.astuple(server) for server in loaded.config.cluster.servers] == [
        ("s1", "redis://a:6379", 7, False),
        ("s2", "redis://b:6379", 5, False),
    ]


def test_servers_that_are_being_drained() -> None:
    loaded = from_toml(SERVERS + "draining = true\n")
    assert [server.draining for server in loaded.config.cluster.servers] == [False, True]
    printed = format_config(loaded, ["cluster"])
    assert load_config(file=ConfigText("printed", printed)).config.cluster == loaded.config.cluster
    assert "draining = false\n" in printed and "draining = true\n" in printed
    assert re.findall(r"servers\]\]  # x.toml line (\d+)", printed) == ["2", "6"], "each has its own line"


def test_servers_from_text() -> None:
    environment = {"DYNAMOTH_SERVERS": " s1=redis://a:6379\n s2=rediss://b:6380/1 "}
    servers = load_config(environment=environment).config.cluster.servers
    assert [(server.id, server.url) for server in servers] == [("s1", "redis://a:6379"), ("s2", "rediss://b:6380/1")]
    assert {server.outgoing_bytes_per_s_max for server in servers} == {125_000_000}


def samples(default: Any, choices: tuple[str, ...]) -> Any:
    if choices:
        return choices[-1]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "some text"


HAVE_TESTS_OF_THEIR_OWN = {
    "cluster.compatibility",
    "cluster.servers",
    "link.tls_cert_file",
    "link.tls_key_file",
    "balancer.load_ratio_safe",
    "balancer.replicate_keep_ratio",
    "coordinator.margin_ratio",
}


@pytest.mark.parametrize("key", sorted(declared_settings().keys() - HAVE_TESTS_OF_THEIR_OWN))
def test_every_setting_comes_from_every_source(key: str) -> None:
    declared = declared_settings()[key]
    value = samples(declared.default, declared.setting.choices)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    toml = text if isinstance(value, bool | int | float) else f'"{text}"'
    for loaded in (
        from_toml(f"[{declared.section}]\n{declared.name} = {toml}\n"),
        from_toml(f"[{declared.section}]\n{declared.name} = '{text}'\n"),
        load_config(environment={declared.variable: text}),
        load_config(flags={key: FlagValue(declared.flag("agent"), text)}),
    ):
        assert getattr(getattr(loaded.config, declared.section), declared.name) == value
        assert type(getattr(getattr(loaded.config, declared.section), declared.name)) is type(declared.default)


def test_a_ratio_has_an_upper_bound_too() -> None:
    loaded = from_toml("[balancer]\nreplicate_keep_ratio = 1\n")
    assert loaded.config.balancer.replicate_keep_ratio == 1.0
    assert "more than 0 up to 1 expected, not 1.1" in refusal("[balancer]\nreplicate_keep_ratio = 1.1\n")
    assert from_toml("[coordinator]\nmargin_ratio = 0.5\n").config.coordinator.margin_ratio == 0.5
    assert "from 0 to 1 expected, not 1.1" in refusal("[coordinator]\nmargin_ratio = 1.1\n")


def test_names_are_unambiguous() -> None:
    everything = declared_settings().values()
    assert len({declared.variable for declared in everything}) == len(everything)
    for own in SECTIONS:
        assert len({declared.flag(own) for declared in everything}) == len(everything)


def test_every_setting_says_what_it_means() -> None:
    for declared in declared_settings().values():
        assert declared.setting.meaning in declared.help
        assert declared.variable in declared.help
        if declared.name.endswith("_per_s"):
            assert declared.setting.unit.endswith("/s"), f"{declared.key} has no unit"
        elif declared.name.endswith("_s"):
            assert declared.setting.unit == "s", f"{declared.key} has no unit"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[agents]\n", r"section \[agents\] \(x.toml line 1\) is not known: did you mean agent\?"),
        (
            "[agent]\nhttp_prot = 1\n",
            r"key agent.http_prot \(x.toml line 2, section \[agent\]\) .* did you mean agent.http_port\?",
        ),
        ("[agent]\nload_ratio_high = 1\n", r"key agent.load_ratio_high .* did you mean balancer.load_ratio_high\?"),
        ("agent = 3\n", r"agent \(x.toml line 1\) must be a section: write \[agent\]"),
        (
            "[agent]\nhttp_port = 70000\n",
            r"agent.http_port: a whole number from 0 to 65535 expected, not 70000 \(from x.toml line 2,",
        ),
        ("[agent]\nhttp_port = 80.5\n", "agent.http_port: a whole number .* not 80.5"),
        ("[agent]\nhttp_port = true\n", "agent.http_port: a whole number .* not True"),
        ("[agent]\nhttp_port = 'x'\n", "agent.http_port: a whole number .* not 'x'"),
        ("[agent]\nhttp_port = [1]\n", r"agent.http_port: a whole number .* not \[1\]"),
        ("[agent]\nserver = 3\n", "agent.server: text expected, not 3"),
        ("[link]\ntls_verify = 1\n", "link.tls_verify: true or false expected, not 1"),
        ("[balancer]\nwait_s = nan\n", r"balancer.wait_s: a number from 0 to 1000000 \(s\) expected, not nan"),
        ("[balancer]\nlease_s = 1e308\n", "balancer.lease_s: .* to 1000000 .* not 1e\\+308"),
        ("[balancer]\nwait_s = inf\n", "balancer.wait_s: .* not inf"),
        ("[balancer]\naveraging_s = 0\n", r"averaging_s: a number more than 0 up to 1000000 \(s\) expected, not 0"),
        ("[log]\nlevel = 'loud'\n", "log.level: one of debug, info, warning, error expected, not 'loud'"),
        (
            "[balancer]\nload_ratio_safe = 0.9\n",
            r"load_ratio_safe: at most balancer.load_ratio_high, which is 0.8, expected, not 0.9 \(from x.toml line 2",
        ),
        ("[link]\ntls_cert_file = 'a'\n", "link.tls_key_file: a file, as link.tls_cert_file is given"),
        ("[cluster]\nservers = 3\n", r"cluster.servers: .*\[\[cluster.servers\]\].* not 3"),
        ("[cluster]\nservers = [3]\n", r"cluster.servers\[0\]: ID=URL, .* not '3'"),
        ("[[cluster.servers]]\nid = 's1'\n", r"cluster.servers\[0\]: the key url is missing .*x.toml line 1"),
        ("[[cluster.servers]]\nurl = 'redis://a'\n", r"cluster.servers\[0\]: the key id is missing"),
        (SERVERS.replace("s2", "s 2"), r"cluster.servers\[1\].id: a name .* not 's 2'"),
        (SERVERS.replace("s2", "s1"), r"cluster.servers\[1\].id: one that no other server has expected, not 's1'"),
        (SERVERS.replace("//b", "//a"), r"cluster.servers\[1\].url: one that no other server has"),
        (SERVERS.replace("= 5", "= 0"), r"cluster.servers\[1\].outgoing_bytes_per_s_max: a whole number from 1"),
        (SERVERS.replace("= 5", "= 1e300"), r"cluster.servers\[1\].outgoing_bytes_per_s_max: .* not 1e\+300"),
        (SERVERS.replace("= 5", f"= {HUGE}"), r"cluster.servers\[1\].outgoing_bytes_per_s_max: .* thousands of digits"),
        (
            "[cluster]\noutgoing_bytes_per_s_max = 1_000_000_000_001\n",
            r"outgoing_bytes_per_s_max: a whole number from 1 to 1000000000000 \(bytes/s\) expected, not 1000000000001",
        ),
        (f"[cluster]\noutgoing_bytes_per_s_max = {HUGE}\n", "outgoing_bytes_per_s_max: .* thousands of digits"),
        (
            "[agent]\nreport_interval_s = 0.0001\n",
            r"report_interval_s: a number from 0.1 to 60 \(s\) expected, not 0.0001",
        ),
        ("[agent]\nreport_interval_s = 1e300\n", r"report_interval_s: .* to 60 \(s\) expected, not 1e\+300"),
        ("[agent]\nreport_interval_s = nan\n", "report_interval_s: .* not nan"),
        (f"[agent]\nreport_interval_s = {HUGE}\n", "report_interval_s: .* thousands of digits"),
        (f"[agent]\nhttp_port = [{HUGE}]\n", "http_port: .* thousands of digits"),
        ("[balancer]\nmemory_bytes_max = 1_000_000_000_000_001\n", "memory_bytes_max: .* to 1000000000000000"),
        (
            SERVERS + "draining = 1\n",
            r"cluster.servers\[1\].draining: true or false expected, not 1 \(from x.toml line 10",
        ),
        (
            SERVERS.replace("url", "draining = true\nurl"),
            r"servers: all have draining = true \(from x.toml line 2, .*\), .* set it to false for at least one",
        ),
        (SERVERS.replace("url", "uri"), r"key cluster.servers\[0\].uri .* is not known: did you mean url\?"),
        ("[agent\n", "x.toml is not TOML: .*line 1"),
        (f"x = {'[' * 3000}", "x.toml is not a configuration: values are nested too deeply"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_cure(text: str, message: str) -> None:
    assert re.search(message, refusal(text)), refusal(text)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DYNAMOTH_AGENT_HTTP_PROT", "1", "variable DYNAMOTH_AGENT_HTTP_PROT is not known: .*DYNAMOTH_AGENT_HTTP_PORT"),
        ("DYNAMOTH_AGENT_HTTP_PORT", "x", "not 'x' .from environment variable DYNAMOTH_AGENT_HTTP_PORT"),
        ("DYNAMOTH_LINK_TLS_VERIFY", "maybe", "true or false expected, not 'maybe'"),
        ("DYNAMOTH_SERVERS", "redis://a", r"cluster.servers\[0\]: ID=URL"),
        ("DYNAMOTH_SERVERS", "s1=a:6379", r"cluster.servers\[0\].url: a URL"),
    ],
)
def test_a_bad_environment_is_refused(variable: str, value: str, message: str) -> None:
    assert re.search(message, refusal(environment={variable: value}))


def test_a_bad_flag_is_refused_by_its_name() -> None:
    assert "(from flag --agent__http_port)" in refusal(agent__http_port="-1")


@pytest.mark.parametrize(
    "variable",
    [
        "PATH",
        "DYNAMOTH_CONFIG",
        "DYNAMOTH_URL",
        "DYNAMOTH_TEST_REDIS_SERVER",
        "DYNAMOTH_ACL_AGENT_PASSWORD",
        "DYNAMOTH_AGENT_SERVICE_HOST",
        "DYNAMOTH_AGENT_SERVICE_PORT_HTTP",
        "DYNAMOTH_AGENT_PORT",
        "DYNAMOTH_PORT_6379_TCP_ADDR",
    ],
)
def test_variables_that_are_no_settings_are_left_alone(variable: str) -> None:
    assert load_config(environment={variable: "tcp://10.0.0.1:6379"}).config == Config()


def test_an_empty_variable_is_not_set() -> None:
    assert load_config(environment={"DYNAMOTH_AGENT_HTTP_PORT": ""}).config == Config()


def test_passwords_are_never_shown() -> None:
    loaded = load_config(environment={"DYNAMOTH_LINK_PASSWORD": "hush"})
    assert loaded.config.link.password == "hush"
    assert "hush" not in format_config(loaded, SECTIONS)
    assert "# password = ***  # environment variable DYNAMOTH_LINK_PASSWORD" in format_config(loaded, SECTIONS)
    assert "hush" not in refusal("[link]\npassword = ['hush']\n")
    for text in ("s1=redis://u:hush@a", "s1=redis://u:hu/s@sh@a", "redis://u:hush@a"):
        message = refusal(environment={"DYNAMOTH_SERVERS": text})
        assert not re.search("hush|hu/s|sh@", message), message
    assert "link.password" in refusal(environment={"DYNAMOTH_SERVERS": "s1=redis://u:hush@a"})


def test_what_is_printed_can_be_loaded_and_names_the_places() -> None:
    flags = {"log.level": FlagValue("--log-level", "debug")}
    loaded = from_toml(SERVERS + "[agent]\nserver = 's2'\n", flags=flags)
    printed = format_config(loaded, SECTIONS)
    assert load_config(file=ConfigText("printed", printed)).config == loaded.config
    assert 'level = "debug"  # flag --log-level' in printed
    assert 'server = "s2"  # x.toml line 11, section [agent]' in printed
    assert "http_port = 0  # default" in printed
    assert "[balancer]" not in format_config(loaded, ["agent"])


@given(st.text())
def test_any_text_survives_being_printed(text: str) -> None:
    loaded = load_config(flags={"link.username": FlagValue("--link-username", text)})
    assert tomllib.loads(format_config(loaded, SECTIONS))["link"]["username"] == text


@given(st.dictionaries(st.sampled_from(sorted(declared_settings())), st.text(max_size=20)), st.text(max_size=60))
def test_nothing_but_config_errors_comes_out(flags: dict[str, str], toml: str) -> None:
    given_flags = {key: FlagValue(f"--{key}", text) for key, text in flags.items()}
    for file in (None, ConfigText("x.toml", toml)):
        try:
            loaded = load_config(file=file, flags=given_flags)
        except ConfigError:
            continue
        assert set(loaded.places) >= set(flags)


def test_later_faults_name_the_place_too() -> None:
    loaded = from_toml("[link]\ntls_ca_file = '/nowhere'\n")
    error = loaded.fault("link.tls_ca_file", "/nowhere", "a file that can be read")
    expected = "link.tls_ca_file: a file that can be read expected, not '/nowhere'"
    assert str(error) == f"{expected} (from x.toml line 2, section [link])"


def test_compatibility_rules_are_tables_or_pairs() -> None:
    toml = """
[[cluster.compatibility]]
pattern = "news.*"
server = "s1"
plain = false
[[cluster.compatibility]]
pattern = "*"
server = "s2"
"""
    rules = from_toml(toml).config.cluster.compatibility
    assert [dataclasses.astuple(rule) for rule in rules] == [("news.*", "s1", False), ("*", "s2", True)]
    given = load_config(environment={"DYNAMOTH_COMPATIBILITY": "a=b=s1 *=s2"}).config.cluster.compatibility
    assert [dataclasses.astuple(rule) for rule in given] == [("a=b", "s1", True), ("*", "s2", True)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            'pattern = "*"',
            r"compatibility\[0\]: the key server is missing in the table \(x.toml line 1, section \[cluster\]\)",
        ),
        ('server = "s1"', r"cluster.compatibility\[0\]: the key pattern is missing in the table"),
        ('pattern = ""\nserver = "s1"', r"compatibility\[0\].pattern: a pattern of 1 to 256 bytes expected, not ''"),
        ('pattern = "*"\nserver = "s1"\nplain = 1', r"plain: true or false expected, not 1"),
        ('pattern = "*"\nserver = "s1"\nchannel = "x"', r"compatibility\[0\].channel .*is not known"),
        ('pattern = "*"\nserver = "s9"\n[[cluster.servers]]\nid = "s1"\nurl = "redis://h:1"', r"\(s1\).* not 's9'"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_toml(f"[[cluster.compatibility]]\n{lines}\n")
