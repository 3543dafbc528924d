"""Loads the configuration of a process from flags, environment and TOML, and prints it.

A value comes from the first of: flag, environment, TOML file, default. An empty environment variable counts as not set.

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
from dynamoth.settings.declare import ENVIRONMENT_PREFIX, Declared, fault, one_of, to_text
from dynamoth.settings.sections import ClusterSettings, CompatibilitySettings, Config, ServerSettings
from dynamoth.settings.toml_lines import Place, lines_of, place_at

OTHER_VARIABLES = ("DYNAMOTH_CONFIG", "DYNAMOTH_URL")
"""Variables that the command line reads itself: the TOML file, and the cluster an administrator speaks to."""

_NOT_SETTINGS = re.compile(
    # Tests and `dynamoth acl` have variables of their own. Kubernetes gives each pod some for each service in the
    # namespace: a service that is called dynamoth-agent makes DYNAMOTH_AGENT_SERVICE_HOST and the like.
    r"DYNAMOTH_(TEST|ACL)_.*|.*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)


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
