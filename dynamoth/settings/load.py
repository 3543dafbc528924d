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
from dynamoth.names import SERVER_ID, SERVER_ID_WORDS
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
    """The text of a TOML file, and its name in messages."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A value from the command line, and the name of its flag."""

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
    except ValueError as error:  # a number with thousands of digits is one, too
        raise ConfigError(f"{file.name} is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file.name} is not a configuration: values are nested too deeply") from error
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


# Servers and rules: lists of tables. In flags and environment variables an item is NAME=VALUE.

_CREDENTIALS = re.compile(r"(?<=://).*(?=@)", re.DOTALL)
_PASSWORD = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]*@")


@dataclass(frozen=True, slots=True)
class _Table:
    """A server or a rule."""

    key: str
    values: Mapping[str, Any]
    place: str

    def fault(self, name: str, accepted: str, found: object) -> ConfigError:
        """Return the error for a value that is not accepted."""
        return fault(f"{self.key}.{name}", found, accepted, place_at(self.place, name))

    def flag(self, name: str, default: bool) -> bool:
        """Return a value that must be true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false", value)
        return value


def _read_tables(
    declared: Declared, raw: Any, place: str, kind: type[Any], pair: tuple[str, str], accepted: str
) -> Iterable[_Table]:
    """Yield the tables of a list. Each has the two keys of ``pair``, and none that ``kind`` has no field for."""
    items: Sequence[Any]
    if isinstance(raw, str):
        # An id has no "=", and a pattern may have some; what follows it is a URL, or an id.
        split = str.partition if pair[0] == "id" else str.rpartition
        parts = ((item, split(item, "=")) for item in raw.split())
        items = [{pair[0]: name, pair[1]: value} if equals else item for item, (name, equals, value) in parts]
    elif isinstance(raw, list):
        items = cast(Sequence[Any], raw)
    else:
        raise fault(declared.key, raw, declared.accepted, place)
    known = [field.name for field in dataclasses.fields(kind)]
    for index, item in enumerate(items):
        key, at = f"{declared.key}[{index}]", place_at(place, index)
        if not isinstance(item, dict):
            raise fault(key, _CREDENTIALS.sub("***", str(item)), accepted, at)
        table = cast(Mapping[str, Any], item)
        for name in table:
            if name not in known:
                raise ConfigError(f"key {key}.{name} ({place_at(at, name)}) is not known: {one_of(name, known)}")
        for name in pair:
            if name not in table:
                raise ConfigError(f'{key}: the key {name} is missing in the table ({at}): add {name} = "..."')
        yield _Table(key, table, at)


def _parse_servers(declared: Declared, raw: Any, place: str) -> tuple[ServerSettings, ...]:
    accepted = "ID=URL, in TOML a table with id and url,"
    tables = list(_read_tables(declared, raw, place, ServerSettings, ("id", "url"), accepted))
    servers = tuple(map(_parse_server, tables))
    for kind in ("id", "url"):
        names = [getattr(server, kind) for server in servers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise tables[index].fault(kind, "one that no other server has", name)
    return servers


def _parse_server(table: _Table) -> ServerSettings:
    id_, url, limit = (table.values.get(name) for name in ("id", "url", "outgoing_bytes_per_s_max"))
    if not isinstance(id_, str) or not SERVER_ID.fullmatch(id_):
        raise table.fault("id", SERVER_ID_WORDS, id_)
    if not isinstance(url, str) or "://" not in url:
        raise table.fault("url", "a URL, redis://host:port or rediss://host:port,", url)
    if "@" in url:
        accepted = (
            "a URL without user and password (the plan shows it to every client;"
            " give them as link.username and link.password)"
        )
        raise table.fault("url", accepted, _CREDENTIALS.sub("***", url))
    capacity = declared_settings()["cluster.outgoing_bytes_per_s_max"]
    is_whole = isinstance(limit, int) and not isinstance(limit, bool)
    if limit is not None and not (is_whole and capacity.setting.admits(limit)):
        raise table.fault("outgoing_bytes_per_s_max", capacity.accepted, limit)
    draining = table.flag("draining", default=False)
    return ServerSettings(id=id_, url=url, outgoing_bytes_per_s_max=limit or 0, draining=draining)


def _parse_rules(declared: Declared, raw: Any, place: str) -> tuple[CompatibilitySettings, ...]:
    accepted = "PATTERN=SERVER, in TOML a table with pattern, server and plain,"
    return tuple(
        map(_parse_rule, _read_tables(declared, raw, place, CompatibilitySettings, ("pattern", "server"), accepted))
    )


def _parse_rule(table: _Table) -> CompatibilitySettings:
    pattern, server = table.values["pattern"], table.values["server"]
    if not isinstance(pattern, str) or not 0 < len(pattern.encode()) <= PATTERN_BYTES_MAX:
        raise table.fault("pattern", f"a pattern of 1 to {PATTERN_BYTES_MAX} bytes", pattern)
    if not isinstance(server, str):
        raise table.fault("server", "the id of a server", server)
    return CompatibilitySettings(pattern=pattern, server=server, plain=table.flag("plain", default=True))


_PARSE: Mapping[str, Callable[[Declared, Any, str], Any]] = MappingProxyType(
    {"cluster.servers": _parse_servers, "cluster.compatibility": _parse_rules}
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
    text = to_text(value, quoted=True)
    if (shown := _PASSWORD.sub(r"\1:***@", text)) != text:
        return f"# {declared.name} = {shown}  # {place}; passwords are not shown"
    return f"{declared.name} = {text}  # {place}"


def _format_servers(loaded: LoadedConfig) -> Iterable[str]:
    for name in ("servers", "compatibility"):
        for index, table in enumerate(getattr(loaded.config.cluster, name)):
            place = place_at(loaded.places[f"cluster.{name}"], index)
            yield from ("", f"[[cluster.{name}]]  # {place}")
            for item in dataclasses.fields(table):
                yield f"{item.name} = {to_text(getattr(table, item.name), quoted=True)}"
