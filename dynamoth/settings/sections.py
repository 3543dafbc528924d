"""The settings of every process: name, default, unit and meaning, each in one place.

Theory of operation
-------------------
A section is a frozen dataclass, and each of its fields is declared with :func:`setting`. Everything else is
derived from these declarations: the keys of the TOML file (``[agent] http_port``), the environment variables
(``DYNAMOTH_AGENT_HTTP_PORT``), the flags of the command line, their ``--help``, the validation and its messages,
and ``--print-config``.

A value comes from the first of: flag, environment, TOML file, default. An empty environment variable counts as
not set.

``ClusterSettings`` is what the whole cluster must agree on: give every process the same. All other sections are
what one process may choose for itself.

This module parses text and mappings. It opens no file and looks at no environment of its own.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from dynamoth.errors import ConfigError
from dynamoth.plan.compatibility import PATTERN_BYTES_MAX
from dynamoth.protocol.reports import REPORT_CHANNELS_MAX
from dynamoth.settings.declare import ENVIRONMENT_PREFIX, Declared, fault, one_of, setting, to_text
from dynamoth.settings.toml_lines import Place, lines_of, place_at

OTHER_VARIABLES = ("DYNAMOTH_CONFIG", "DYNAMOTH_URL")
"""Variables that the command line reads itself: the TOML file, and the cluster an administrator speaks to."""

_NOT_SETTINGS = re.compile(
    # Tests and `dynamoth acl` have variables of their own. Kubernetes gives each pod some for each service in the
    # namespace: a service that is called dynamoth-agent makes DYNAMOTH_AGENT_SERVICE_HOST and the like.
    r"DYNAMOTH_(TEST|ACL)_.*|.*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)

GIGABIT_BYTES_PER_S = 125_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One Redis server, an item of ``[[cluster.servers]]``."""

    id: str
    """Its name in plans, logs and metrics; never given to another server."""
    url: str
    """Where agents, balancer and clients reach it. Without credentials: the plan shows it to every client."""
    outgoing_bytes_per_s_max: int
    """What counts as load ratio 1. Left out: ``cluster.outgoing_bytes_per_s_max``."""
    draining: bool = False
    """Whether the balancer puts no channel there and moves away what is there, so that it can be stopped. Only the
    balancer looks at this: restart it after a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilitySettings:
    """One rule about channels that plain Redis clients use, too: an item of ``[[cluster.compatibility]]``."""

    pattern: str
    """Which channels, as for PSUBSCRIBE."""
    server: str
    """The id of the server where these clients are."""
    plain: bool = True
    """Whether messages carry no envelopes, so that plain clients can read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What the whole cluster must agree on."""

    servers: tuple[ServerSettings, ...] = setting((), "the Redis servers")
    compatibility: tuple[CompatibilitySettings, ...] = setting(
        (),
        "the first rules of a new cluster for channels shared with plain Redis clients; later they are changed by"
        " 'dynamoth plan compatibility'",
    )
    outgoing_bytes_per_s_max: int = setting(
        GIGABIT_BYTES_PER_S,
        "what a server can send, where a server has no value of its own; load ratios are relative to it",
        unit="bytes/s",
        minimum=1,
    )
    trusted_hosts: str = setting(
        "",
        "hosts that get our credentials besides those of the servers: names, suffixes (*.redis.example.com), networks"
        " (10.1.0.0/16), separated by spaces; for servers that are still to be added",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How this process connects to the Redis servers."""

    username: str = setting("", "Redis user; empty for the default user")
    password: str = setting("", "its password; empty for none", secret=True)
    password_file: str = setting("", "a file whose first line is the password, instead of password; empty for none")
    tls_ca_file: str = setting("", "whom to trust at rediss:// servers (PEM); empty for the system's")
    tls_cert_file: str = setting("", "our own certificate (PEM), for tls-auth-clients; empty for none")
    tls_key_file: str = setting("", "the key of that certificate (PEM)")
    tls_verify: bool = setting(True, "whether certificates are checked; off for tests only")
    connect_timeout_s: float = setting(5.0, "bound of one attempt to connect", unit="s", above=0)
    ping_interval_s: float = setting(1.5, "silence before a PING; 0 for never", unit="s", minimum=0)
    ping_timeout_s: float = setting(3.4, "more silence before the link is down", unit="s", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What one agent may choose."""

    server: str = setting("", "id of the server that this agent sits beside")
    http_host: str = setting("127.0.0.1", "where /healthz, /readyz and /metrics listen")
    http_port: int = setting(0, "their port; 0 for no HTTP", minimum=0, maximum=65535)
    report_interval_s: float = setting(1.0, "time between two reports to the balancer", unit="s", above=0)
    channels_per_report_max: int = setting(
        1000,
        "the busiest channels, which a report names; the others are in its sums",
        minimum=1,
        maximum=REPORT_CHANNELS_MAX,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerSettings:
    """What the balancer may choose. The defaults are the values of the paper's authors, where these are known."""

    load_ratio_high: float = setting(0.8, "a server above this load ratio is relieved", above=0)
    load_ratio_safe: float = setting(
        0.6, "servers are relieved to this load ratio, and no move fills one above it", above=0
    )
    wait_s: float = setting(20.0, "least time between two plans (T_wait of the paper)", unit="s", minimum=0)
    averaging_s: float = setting(10.0, "loads are averaged over this time", unit="s", above=0)
    channel_rest_s: float = setting(
        30.0, "a channel that was moved is left where it is for this time", unit="s", minimum=0
    )
    moves_per_plan_max: int = setting(500, "most channels that one plan moves", minimum=1)
    moves_per_server_max: int = setting(100, "most that it moves away from, or to, one server", minimum=1)
    transitions_max: int = setting(5000, "most channels in transition at once", minimum=1)
    agent_stale_s: float = setting(5.0, "an agent silent for this time counts as down", unit="s", above=0)
    lease_s: float = setting(
        5.0, "another balancer can lead when one has not renewed its lease for this time", unit="s", minimum=3
    )
    standby: bool = setting(
        False, "wait while another balancer is at work, and replace it when it ends; off: end with exit code 2"
    )
    all_subscribers_ratio_min: float = setting(
        100.0,
        "a channel with more publications/s per subscriber is replicated so that all subscribers listen at all its"
        " servers: few subscribers with many messages each",
        above=0,
    )
    all_publishers_ratio_min: float = setting(
        10.0,
        "a channel with more subscribers per publication/s is replicated so that publications go to all its servers:"
        " one more copy of each is cheap beside its many deliveries",
        above=0,
    )
    replicate_publications_per_s_min: float = setting(
        1000.0,
        "channels with fewer publications/s are not replicated for their sake",
        unit="1/s",
        minimum=0,
    )
    replicate_subscribers_min: int = setting(
        100, "channels with fewer subscribers are not replicated for their sake: one server is quick enough", minimum=0
    )
    replicate_load_ratio_min: float = setting(
        0.5,
        "a channel is replicated only when it alone makes more than this load ratio: with less, a server has room for"
        " others. One that makes more than load_ratio_high is replicated whatever its publications and subscribers",
        minimum=0,
    )
    replicate_keep_ratio: float = setting(
        0.6,
        "a replicated channel loses servers below this share of the load that replicated it, so that it does not go to"
        " and fro",
        above=0,
        maximum=1,
    )
    replicas_max: int = setting(
        16, "most servers of a channel that the balancer replicates; 1: it changes no replication", minimum=1
    )
    replication_rest_s: float = setting(
        30.0, "a channel whose replication was changed is left so for this time", unit="s", minimum=0
    )
    replica_dead_s: float = setting(
        10.0, "a server neither reached nor heard for this time is no longer wanted as a replica", unit="s", minimum=0
    )
    metrics_file: str = setting("", "each report of an agent is written here, a line of JSON; empty for nowhere")
    http_host: str = setting("127.0.0.1", "where /healthz, /readyz and /metrics listen")
    http_port: int = setting(0, "their port; 0 for no HTTP", minimum=0, maximum=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What this process writes to stderr."""

    level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))
    format: str = setting("json", "one JSON object per line, or text for people", choices=("json", "text"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a process. Made by :func:`load_config`."""

    cluster: ClusterSettings = ClusterSettings()
    link: LinkSettings = LinkSettings()
    agent: AgentSettings = AgentSettings()
    balancer: BalancerSettings = BalancerSettings()
    log: LogSettings = LogSettings()


@cache
def declared_settings() -> Mapping[str, Declared]:
    """Return every setting, by its key."""
    found = (
        Declared(section, item.name, item.default, item.metadata["setting"])
        for section, default in _sections().items()
        for item in dataclasses.fields(default)
    )
    return MappingProxyType({declared.key: declared for declared in found})


def _sections() -> dict[str, Any]:
    defaults = Config()
    return {item.name: getattr(defaults, item.name) for item in dataclasses.fields(defaults)}


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The text of a TOML file, and the name that messages call it by."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FlagValue:
    """What was given on the command line, and the name of the flag."""

    flag: str
    text: str


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, and where each of its values came from."""

    config: Config
    #: By key; the keys that nobody gave are not in it.
    places: Mapping[str, str]

    def fault(self, key: str, found: object, accepted: str) -> ConfigError:
        """Return the error for a value that proves unusable later (``found`` is shown: no secrets)."""
        return fault(key, found, accepted, self.places.get(key, "the default"))


def load_config(
    *,
    file: ConfigText | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    flags: Mapping[str, FlagValue] = MappingProxyType({}),
) -> LoadedConfig:
    """Put together the configuration of a process.

    Args:
        file: the TOML file, None for none.
        environment: all variables; only ``DYNAMOTH_...`` is looked at.
        flags: by key (``agent.http_port``).

    Raises:
        ConfigError: a key is not known, or a value not accepted. The text names the key, what was found, what
            is accepted and where it stands.

    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    of_flags = ((key, value.text, f"flag {value.flag}") for key, value in flags.items())
    for source in (_from_file(file) if file else (), _from_environment(environment), of_flags):
        for key, raw, place in source:
            declared = declared_settings()[key]
            parse = _PARSE.get(key, Declared.parse)
            values[key] = parse(declared, raw, place)
            places[key] = place
    loaded = LoadedConfig(_build(values), MappingProxyType(places))
    _check_relations(loaded)
    return loaded


def _build(values: Mapping[str, Any]) -> Config:
    sections = _sections()
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections[section] = dataclasses.replace(sections[section], **{name: value})
    cluster = cast(ClusterSettings, sections["cluster"])
    servers = tuple(
        dataclasses.replace(
            server,
            outgoing_bytes_per_s_max=server.outgoing_bytes_per_s_max or cluster.outgoing_bytes_per_s_max,
        )
        for server in cluster.servers
    )
    sections["cluster"] = dataclasses.replace(cluster, servers=servers)
    return Config(**sections)


def _check_relations(loaded: LoadedConfig) -> None:
    config = loaded.config
    balancer = config.balancer
    if balancer.load_ratio_safe > balancer.load_ratio_high:
        accepted = f"at most balancer.load_ratio_high, which is {balancer.load_ratio_high:g},"
        raise loaded.fault("balancer.load_ratio_safe", balancer.load_ratio_safe, accepted)
    ids = [server.id for server in config.cluster.servers]
    if config.agent.server and ids and config.agent.server not in ids:
        accepted = f"the id of a server of the cluster ({', '.join(ids)})"
        raise loaded.fault("agent.server", config.agent.server, accepted)
    for rule in config.cluster.compatibility:
        if ids and rule.server not in ids:
            accepted = f"the id of a server of the cluster ({', '.join(ids)})"
            raise loaded.fault("cluster.compatibility", rule.server, accepted)
    if ids and all(server.draining for server in config.cluster.servers):
        raise ConfigError(
            f"cluster.servers: all have draining = true (from {loaded.places['cluster.servers']}), and their channels"
            " can go nowhere: set it to false for at least one"
        )
    if bool(config.link.tls_cert_file) != bool(config.link.tls_key_file):
        missing, given = ("key", "cert") if config.link.tls_cert_file else ("cert", "key")
        raise loaded.fault(f"link.tls_{missing}_file", "", f"a file, as link.tls_{given}_file is given,")


# Where values come from. Each source gives (key, raw value, place).

_Given = tuple[str, Any, str]


def _from_environment(environment: Mapping[str, str]) -> Iterable[_Given]:
    known = {declared.variable: declared.key for declared in declared_settings().values()}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text or variable in OTHER_VARIABLES:
            continue
        if variable in known:
            yield known[variable], text, f"environment variable {variable}"
        elif not _NOT_SETTINGS.fullmatch(variable):
            raise ConfigError(f"environment variable {variable} is not known: {one_of(variable, known)}")


def _from_file(file: ConfigText) -> Iterable[_Given]:
    try:
        document = tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file.name} is not TOML: {error}") from error
    lines = lines_of(file.text)
    sections = _sections()
    for section, table in document.items():
        place = Place(file.name, lines, section)
        if section not in sections:
            raise ConfigError(f"section [{section}] ({place}) is not known: {one_of(section, sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} ({place}) must be a section: write [{section}]")
        for name, value in cast(Mapping[str, Any], table).items():
            key, place = f"{section}.{name}", Place(file.name, lines, section, name)
            if key not in declared_settings():
                raise ConfigError(f"key {key} ({place}) is not known: {one_of(key, declared_settings())}")
            yield key, value, place


# The list of servers, the one value that has parts.

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
_CREDENTIALS = re.compile(r"(?<=://).*(?=@)", re.DOTALL)


def _parse_servers(declared: Declared, raw: Any, place: str) -> tuple[ServerSettings, ...]:
    items: Sequence[Any]
    if isinstance(raw, str):
        pairs = ((item, item.partition("=")) for item in raw.split())
        items = [{"id": id_, "url": url} if equals else item for item, (id_, equals, url) in pairs]
    elif isinstance(raw, list):
        items = cast(Sequence[Any], raw)
    else:
        raise fault(declared.key, raw, declared.accepted, place)
    servers = tuple(
        _parse_server(f"{declared.key}[{index}]", item, place_at(place, index)) for index, item in enumerate(items)
    )
    for kind in ("id", "url"):
        names = [getattr(server, kind) for server in servers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise fault(
                    f"{declared.key}[{index}].{kind}",
                    name,
                    "one that no other server has",
                    place_at(place, index, kind),
                )
    return servers


def _parse_server(key: str, item: Any, place: str) -> ServerSettings:
    if not isinstance(item, dict):
        shown = _CREDENTIALS.sub("***", str(item))
        raise fault(key, shown, "ID=URL, in TOML a table with id and url,", place)
    table = cast(Mapping[str, Any], item)
    known = [item.name for item in dataclasses.fields(ServerSettings)]
    for name in table:
        if name not in known:
            raise ConfigError(f"key {key}.{name} ({place_at(place, name)}) is not known: {one_of(name, known)}")
    _check_given(key, table, ("id", "url"), place)
    id_, url, limit = table.get("id"), table.get("url"), table.get("outgoing_bytes_per_s_max")
    if not isinstance(id_, str) or not _ID.fullmatch(id_):
        raise fault(f"{key}.id", id_, "a name of up to 64 letters, digits, '.', '_' and '-'", place_at(place, "id"))
    if not isinstance(url, str) or "://" not in url:
        raise fault(f"{key}.url", url, "a URL, redis://host:port or rediss://host:port,", place_at(place, "url"))
    if "@" in url:
        accepted = (
            "a URL without user and password (the plan shows it to every client;"
            " give them as link.username and link.password)"
        )
        raise fault(f"{key}.url", _CREDENTIALS.sub("***", url), accepted, place_at(place, "url"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise fault(
            f"{key}.outgoing_bytes_per_s_max",
            limit,
            "a whole number from 1 (bytes/s)",
            place_at(place, "outgoing_bytes_per_s_max"),
        )
    draining = table.get("draining", False)
    if not isinstance(draining, bool):
        raise fault(f"{key}.draining", draining, "true or false", place_at(place, "draining"))
    return ServerSettings(id=id_, url=url, outgoing_bytes_per_s_max=limit or 0, draining=draining)


def _check_given(key: str, table: Mapping[str, Any], needed: Iterable[str], place: str) -> None:
    for name in needed:
        if name not in table:
            raise ConfigError(f'{key}: the key {name} is missing in the table ({place}): add {name} = "..."')


_RULES_ACCEPTED = "PATTERN=SERVER, in TOML a table with pattern, server and plain,"


def _parse_compatibility(declared: Declared, raw: Any, place: str) -> tuple[CompatibilitySettings, ...]:
    items: Sequence[Any]
    if isinstance(raw, str):
        pairs = ((item, item.rpartition("=")) for item in raw.split())
        items = [
            {"pattern": pattern, "server": server} if equals else item for item, (pattern, equals, server) in pairs
        ]
    elif isinstance(raw, list):
        items = cast(Sequence[Any], raw)
    else:
        raise fault(declared.key, raw, _RULES_ACCEPTED, place)
    return tuple(
        _parse_rule(f"{declared.key}[{index}]", item, place_at(place, index)) for index, item in enumerate(items)
    )


def _parse_rule(key: str, item: Any, place: str) -> CompatibilitySettings:
    if not isinstance(item, dict):
        raise fault(key, item, _RULES_ACCEPTED, place)
    table = cast(Mapping[str, Any], item)
    known = [item.name for item in dataclasses.fields(CompatibilitySettings)]
    for name in table:
        if name not in known:
            raise ConfigError(f"key {key}.{name} ({place_at(place, name)}) is not known: {one_of(name, known)}")
    _check_given(key, table, ("pattern", "server"), place)
    pattern, server, plain = table.get("pattern"), table.get("server"), table.get("plain", True)
    if not isinstance(pattern, str) or not 0 < len(pattern.encode()) <= PATTERN_BYTES_MAX:
        raise fault(
            f"{key}.pattern", pattern, f"a pattern of 1 to {PATTERN_BYTES_MAX} bytes", place_at(place, "pattern")
        )
    if not isinstance(server, str):
        raise fault(f"{key}.server", server, "the id of a server", place_at(place, "server"))
    if not isinstance(plain, bool):
        raise fault(f"{key}.plain", plain, "true or false", place_at(place, "plain"))
    return CompatibilitySettings(pattern=pattern, server=server, plain=plain)


_PARSE: Mapping[str, Callable[[Declared, Any, str], Any]] = MappingProxyType(
    {"cluster.servers": _parse_servers, "cluster.compatibility": _parse_compatibility}
)


def format_config(loaded: LoadedConfig, sections: Sequence[str]) -> str:
    """Return the configuration as a TOML file, without secrets, and with the place of each value as comment."""
    lines = ["# What is in effect. A value comes from the first of: flag, environment, file, default."]
    for section in sections:
        lines += ["", f"[{section}]"]
        values = getattr(loaded.config, section)
        for declared in declared_settings().values():
            if declared.section == section and not isinstance(declared.default, tuple):
                lines.append(_format_setting(declared, getattr(values, declared.name), loaded.places))
        if section == "cluster":
            lines += _format_servers(loaded)
    return "\n".join([*lines, ""])


def _format_setting(declared: Declared, value: Any, places: Mapping[str, str]) -> str:
    place = places.get(declared.key, "default")
    if declared.setting.secret and value:
        return f"# {declared.name} = ***  # {place}; not shown"
    return f"{declared.name} = {to_text(value, quoted=True)}  # {place}"


def _format_servers(loaded: LoadedConfig) -> Iterable[str]:
    for name in ("servers", "compatibility"):
        for table in getattr(loaded.config.cluster, name):
            yield from ("", f"[[cluster.{name}]]  # {loaded.places[f'cluster.{name}']}")
            for item in dataclasses.fields(table):
                yield f"{item.name} = {to_text(getattr(table, item.name), quoted=True)}"
